"""How reports are written: rows as CSV, and a picture of several panels."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["panels", "write_rows"]


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as CSV."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def panels(path: str | Path, models: Sequence[tuple[str, int]], x: str, y: str) -> Iterator[list[Any]]:
    """Axes for each parameterization and width, side by side; the picture is saved in the end.

    Raises:
        ImportError: If there is no matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(models), 3.4), layout="constrained")
    every = list(figure.subplots(1, len(models), sharey=True, squeeze=False)[0])
    yield every
    for axes, (kind, width) in zip(every, models, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(x)
        axes.set_title(f"{kind}, width {width}", fontsize=10)
    every[0].set_ylabel(y)
    every[-1].legend(fontsize="xx-small")
    figure.savefig(path, dpi=150)
