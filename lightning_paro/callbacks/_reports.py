"""What callbacks write into a logger's folder, perhaps a remote one; what fails is told, and costs nothing else."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning_utilities.core.rank_zero import rank_zero_warn

__all__ = ["save_figure", "told", "write_table"]


def write_table(who: str, path: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV.

    Args:
        who: Name of the callback.
        path: Of the file, whose folder is made.
        columns: Their names.
        rows: Their values.
    """
    files = get_filesystem(path)
    with told(who, path):
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with files.open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)


def save_figure(figure: Any, path: str) -> None:
    """Save a figure of matplotlib as PNG."""
    with get_filesystem(path).open(path, "wb") as file:
        figure.savefig(file, dpi=150, format="png")


@contextmanager
def told(who: str, path: str) -> Iterator[None]:
    """A report that cannot be written is no reason to lose a training, nor its last checkpoint."""
    try:
        yield
    except Exception as error:
        rank_zero_warn(f"{who} could not write {path}: {type(error).__name__}: {error}. Training goes on.")
