"""``lightning-paro supar``: whether hyperparameters of a user's model carry over to other widths and densities."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from lightning_paro.cli._output import console, make_folders
from lightning_paro.experiments import coord_check, lr_transfer_sweep

__all__ = ["VERBS"]

HINT = "HINT: file.py:name, or package.module:name."


def check(
    *,
    make: str,
    data: str,
    widths: str,
    densities: str = "1,1/4,1/16",
    parameterizations: str = "sp,mup,supar",
    seeds: int = 3,
    steps: int = 10,
    modules: str | None = None,
    accelerator: str = "auto",
    json: Path | None = None,
    csv: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Train a few steps at every width and density, and compare how large activations are.

    Args:
        make: What makes the module of a lightning_paro.experiments.Setting, as file.py:name or package.module:name.
        data: What returns the dataloader, likewise.
        widths: With commas between.
        densities: Shares of weights that are kept, with commas between; the largest is what others are compared with.
        parameterizations: With commas between.
        seeds: How many, from 0.
        steps: Optimizer steps of a run.
        modules: Names of the modules to watch, with commas between; all that hold a matrix unless told.
        accelerator: As the Trainer's.
        json: Write means over seeds to this file.
        csv: Write every value to this file.
        plot: Draw activations against density into this file.
    """
    report = coord_check(
        _found(make, "make"), _found(data, "data")(), widths=_numbers(widths, "widths", int),
        densities=_numbers(densities, "densities", _share), parameterizations=parameterizations.split(","),  # type: ignore[arg-type]
        seeds=range(seeds), steps=steps, modules=None if modules is None else modules.split(","),
        trainer={"accelerator": accelerator},
    )  # fmt: skip
    screen = console(160)
    screen.print(report)
    for kind in dict.fromkeys(row["parameterization"] for row in report.rows):
        screen.print(f"{kind}: at most {report.deviation(kind):.0%} from the dense model's.")
    make_folders(json, csv, plot)
    if json is not None:
        report.write_json(json)
    if csv is not None:
        report.write_csv(csv)
    if plot is not None:
        report.plot(plot)


def sweep(
    *,
    make: str,
    data: str,
    lrs: str,
    widths: str,
    densities: str = "1,1/4,1/16",
    parameterizations: str = "sp,mup,supar",
    seeds: int = 3,
    steps: int = 100,
    mode: Literal["global", "hidden"] = "global",
    runs: Path | None = None,
    accelerator: str = "auto",
    csv: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Train at every learning rate, width and density, and compare where the loss is lowest.

    Args:
        make: What makes the module of a lightning_paro.experiments.Setting, as file.py:name or package.module:name.
        data: What returns the dataloader, likewise.
        lrs: Base learning rates, with commas between; 2^-9..2^-5 are all powers of two between.
        widths: With commas between.
        densities: Shares of weights that are kept, with commas between; the largest is what others are compared with.
        parameterizations: With commas between.
        seeds: How many, from 0.
        steps: Optimizer steps of a run.
        mode: Sweep the learning rate of all tensors, or of hidden weights only.
        runs: A file of JSON lines, for one module and one data: runs are written to it one by one, and those that are
            there are not made again.
        accelerator: As the Trainer's.
        csv: Write every run to this file.
        plot: Draw loss against learning rate into this file.
    """
    report = lr_transfer_sweep(
        _found(make, "make"), _found(data, "data")(), lrs=_rates(lrs), widths=_numbers(widths, "widths", int),
        densities=_numbers(densities, "densities", _share), parameterizations=parameterizations.split(","),  # type: ignore[arg-type]
        seeds=range(seeds), steps=steps, mode=mode, path=runs, trainer={"accelerator": accelerator},
    )  # fmt: skip
    console(160).print(report)
    make_folders(csv, plot)
    if csv is not None:
        report.write_csv(csv)
    if plot is not None:
        report.plot(plot)


VERBS: dict[str, Callable[..., None]] = {"coord-check": check, "sweep": sweep}


def _found(place: str, option: str) -> Any:
    """What stands under a name in a file or a module."""
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ValueError(f"{option}={place!r} is not understood. {HINT}")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ValueError(f"{option}={place!r}: there is no file {where}. {HINT}")
        names = runpy.run_path(where, run_name=Path(where).stem)
    else:
        names = vars(importlib.import_module(where))
    if not callable(names.get(name)):
        raise ValueError(f"{option}={place!r}: {where} has no function or class {name}. {HINT}")
    return names[name]


def _numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.strip("[] ").split(",")]
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{option}={text!r} is not understood: expected numbers with commas between.") from None


def _share(text: str) -> float:
    return float(Fraction(text.strip()))


def _rates(text: str) -> list[float]:
    if ".." not in text:
        return _numbers(text, "lrs", _rate)
    ends = re.fullmatch(r"\s*2\^(-?\d+)\.\.2\^(-?\d+)\s*", text)
    if ends is None or not int(ends[1]) < int(ends[2]):
        raise ValueError(f"lrs={text!r} is not understood: expected powers of two from low to high, as 2^-9..2^-5.")
    return [2.0**power for power in range(int(ends[1]), int(ends[2]) + 1)]


def _rate(text: str) -> float:
    return 2.0 ** float(text.strip()[2:]) if text.strip().startswith("2^") else float(text)
