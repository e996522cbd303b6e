"""From records of jobs to one row a contestant: its best number of blocks, with the time and memory of just that."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.lab.schedule import Record

__all__ = ["Row", "rows_of"]


@dataclass(frozen=True)
class Row:
    """A contestant in a table.

    Attributes:
        contestant: Its name.
        blocks: Blocks a unit, bucket or launch.
        step_s: Median of all its measured steps.
        range_s: The smallest and the largest median of a repeat.
        repeats: How often it was measured; 0 if only the scouting was done.
        peak_bytes: Of the largest rank.
        loss: Mean over ranks, of the last step of a repeat.
        accumulator: Dtype and part of the gradient accumulator.
        scouted_s: Seconds a step by number of blocks.
        more: What it said of itself.
    """

    contestant: str
    blocks: int
    step_s: float
    range_s: tuple[float, float]
    repeats: int
    peak_bytes: int
    loss: float
    accumulator: str
    scouted_s: dict[int, float]
    more: dict[str, Any]


def rows_of(records: Iterable[Record], model: str, accumulate: int) -> dict[str, Row]:
    """The rows of one table, fastest first."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        if (record.job.model, record.job.accumulate, record.status) == (model, accumulate, "ok"):
            by_name.setdefault(record.job.contestant, []).append(record)
    rows = [_row(name, tried) for name, tried in by_name.items()]
    return {row.contestant: row for row in sorted(rows, key=lambda row: row.step_s)}


def _row(name: str, tried: list[Record]) -> Row:
    scouted = {record.job.blocks: record.median for record in tried if not record.job.repeat}
    full = [record for record in tried if record.job.repeat]
    chosen = full or [min(tried, key=lambda record: record.median)]
    medians = [record.median for record in chosen]
    more = dict(chosen[-1].more or {})
    return Row(
        name, chosen[-1].job.blocks, statistics.median(s for record in chosen for s in record.seconds),
        (min(medians), max(medians)), len(full), max(record.peak_bytes for record in chosen), chosen[-1].loss,
        more.pop("accumulator", ""), scouted, more,
    )  # fmt: skip
