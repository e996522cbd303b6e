"""A sweep's file of JSON lines: what it is of, then a line a run. A sweep that was cut off goes on from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_paro.experiments._settings import Setting

__all__ = ["add_run", "earlier_runs", "head_of", "row_of"]


def head_of(make: Callable[..., Any], trainer: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What the runs of a sweep have in common; another sweep's are told apart by it.

    Args:
        make: Makes the module; its name is kept.
        trainer: Arguments of every run's Trainer.
        more: What else, as it can be in JSON.
    """
    # without addresses, which are others in the next process
    options = {name: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(trainer[name])) for name in sorted(trainer)}
    return {**more, "make": _name(make), "trainer": options}


def _name(make: Callable[..., Any]) -> str:
    if isinstance(make, partial):
        arguments = [*map(_argument, make.args), *(f"{key}={_argument(value)}" for key, value in make.keywords.items())]
        return f"{_name(make.func)}({', '.join(arguments)})"
    return str(getattr(make, "__qualname__", type(make).__qualname__))


def _argument(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (str, int, float)) else type(value).__qualname__


def row_of(setting: Setting, loss: float) -> dict[str, Any]:
    """A run in plain values."""
    return setting.row() | {"loss": loss}


def add_run(path: Path, setting: Setting, loss: float) -> None:
    """Write a run that is done."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row_of(setting, loss)) + "\n")


def earlier_runs(path: Path, head: Mapping[str, Any]) -> dict[Setting, float]:
    """The losses of a file, by run; one that is not there, or empty, is begun.

    Raises:
        ValueError: If the file is of another sweep, or a line cannot be read.
    """
    lines = _whole_lines(path)
    if not lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
        return {}
    there = _read(path, 1, lines[0], json.loads)
    if there != head:
        raise ValueError(f"{path} is of another sweep: {there} there, {dict(head)} here. HINT: give another file.")
    return dict(_read(path, number, line, _run) for number, line in enumerate(lines[1:], 2))


def _whole_lines(path: Path) -> list[str]:
    """All lines; one that a killed process has not written to its end is taken out of the file."""
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if rest:
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        part.replace(path)
    return lines


def _run(line: str) -> tuple[Setting, float]:
    row = json.loads(line)
    return Setting(**{key: value for key, value in row.items() if key != "loss"}), float(row["loss"])


def _read(path: Path, number: int, line: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(line)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path}, line {number}: expected {'what the sweep is of' if number == 1 else 'a run'} as JSON, found "
            f"{line[:80]!r}. HINT: give another file; or take out a run's line, then it is made again."
        ) from None
