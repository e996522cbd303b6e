"""What follows from rows that were measured: whether memory reaches its bars, and how far time is from arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.lab.bars import Bar

__all__ = ["Speed", "memory_bars", "speeds", "told_bars"]

GIB = 2**30
Row = dict[str, Any]

ERROR_PERCENT, PEAK_GIB = 2.0, 23.0


def memory_bars(rows: Iterable[Row]) -> list[Bar]:
    """The bars of memory: the formula holds, and two layers of Llama-2-7B fit where the paper says, below LoRA."""
    done = [row for row in rows if row["status"] == "ok"]
    errors = [100 * abs(row["error"]) for row in done]
    peaks = {(row["attention"], row["arm"]): row["peak_bytes"] for row in done if row["shape"] == "llama-2-7b"}
    bars = [Bar("largest error of the formula, %", max(errors, default=None), ERROR_PERCENT, False)]
    if not any(peaks.values()):  # no such model, or no GPU
        return bars
    peak = peaks.get(("sdpa", "lisa_2"))
    bars.append(Bar("E+H+2 layers, sdpa, peak GiB", peak and peak / GIB, PEAK_GIB, False))
    for attention in ("eager", "sdpa"):
        mine, lora = (peaks.get((attention, arm)) for arm in ("lisa_2", "lora_128"))
        bars.append(Bar(f"E+H+2 layers, {attention}, peak of LoRA r = 128", mine and lora and mine / lora, 1.0, False))
    return bars


def told_bars(bars: Iterable[Bar]) -> list[Row]:
    """As they stand in the JSON."""
    return [asdict(bar) | {"reached": bar.reached} for bar in bars]


@dataclass(frozen=True)
class Speed:
    """How many times as fast as full fine-tuning an arm is, and would be by arithmetic alone.

    In matrices, a token costs every parameter two operations in the forward, two for the gradient of what comes in, and
    two more for its own gradient if it is trained. The products of attention have no parameters and are left out: they
    cost all arms the same. The optimizer is bound by memory, so it costs in proportion to what is trained.

    Attributes:
        row: What was measured.
        passes: Forward and backward together, measured.
        passes_bound: By operations.
        step: The whole step, measured.
        step_bound: With the passes by operations, the optimizer by the parameters that are trained, and what is between
            steps, from those that were measured of full fine-tuning.
    """

    row: Row
    passes: float
    passes_bound: float
    step: float
    step_bound: float


def speeds(rows: Iterable[Row]) -> list[Speed]:
    """Of every row of times that has one of full fine-tuning to be compared with, that one included."""
    done = [row for row in rows if row["status"] == "ok" and row["measure"] == "time"]
    found = []
    for row in done:
        full = next((other for other in done if other["arm"] == "full" and _setting(other) == _setting(row)), None)
        if full is not None:
            found.append(_speed(row, full))
    return found


def _setting(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["batch"], row["compiled"]


def _speed(row: Row, full: Row) -> Speed:
    work, whole = (2 * r["matrices"] + r["trained_matrices"] for r in (row, full))
    passes = _passes(full)
    between = full["step_s"] - passes - full["update_s"]
    least = passes * work / whole + full["update_s"] * row["trained"] / full["trained"] + between
    return Speed(row, passes / _passes(row), whole / work, full["step_s"] / row["step_s"], full["step_s"] / least)


def _passes(row: Row) -> float:
    return float(row["forward_s"] + row["backward_s"])
