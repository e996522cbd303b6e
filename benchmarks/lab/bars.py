"""The bars: what has to be reached, as numbers, and whether the rows of a table reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.lab.contestants import HSDP, partitions
from benchmarks.lab.rows import Row

__all__ = ["FASTER", "SETTINGS", "Bar", "best", "even_bars", "uneven_bars"]

Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Bar:
    """A number that was measured beside the number it has to reach; None where a row that it needs is not there."""

    text: str
    value: float | None
    needed: float
    at_least: bool

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.needed if self.at_least else self.value <= self.needed


def best(rows: Rows, names: tuple[str, ...] | list[str]) -> Row | None:
    """The fastest of some contestants."""
    return min((rows[name] for name in names if name in rows), key=lambda row: row.step_s, default=None)


def _speed(slow: Row | None, fast: Row | None) -> float | None:
    return slow.step_s / fast.step_s if slow and fast else None


def _memory(mine: Row | None, theirs: Row | None) -> float | None:
    return mine.peak_bytes / theirs.peak_bytes if mine and theirs and theirs.peak_bytes else None


FASTER = {(2, 2): (5.5, 2.0), (4, 2): (9.0, 2.2), (2, 4): (3.1, 2.2)}
"""By hosts and GPUs: how much faster than FULL_SHARD and than the best HSDP."""

LLAMA = ("llama-1b", "llama-1b-mb8")
"""Where computation is large: the second with micro-batches of twice the size."""

SETTINGS = (*(("gpt2-medium", 8, *where) for where in FASTER), *((name, 8, 2, 4) for name in LLAMA))
"""Model, number of micro-batches, hosts and GPUs that have bars between uneven hosts."""


def uneven_bars(rows: Rows, model: str, accumulate: int, hosts: int, gpus: int) -> list[Bar]:
    """The bars between uneven hosts; none for settings that they do not name."""
    mine, hsdp = best(rows, partitions()), best(rows, HSDP)
    floor, legs = rows.get("floor"), rows.get("legs")
    bars = []
    if model == "gpt2-medium" and accumulate == 8 and (hosts, gpus) in FASTER:
        full, two = FASTER[hosts, gpus]
        iig, ggg, sharded = rows.get("paro_iig"), rows.get("paro_ggg"), rows.get("fsdp_full")
        limit = floor.step_s + legs.step_s if floor and legs else None
        bars = [
            Bar("best PaRO, times as fast as FSDP FULL_SHARD", _speed(sharded, mine), full, True),
            Bar("best PaRO, times as fast as the best HSDP", _speed(hsdp, mine), two, True),
            Bar("paro_iig, memory of fully_shard 2-D", _memory(iig, rows.get("fully_shard_2d")), 0.93, False),
            Bar(
                "paro_iig accumulating in bf16, as fully_shard 2-D does, memory of that",
                _memory(rows.get("paro_iig_low"), rows.get("fully_shard_2d")),
                0.93,
                False,
            ),
            Bar("paro_iig, memory of FSDP HYBRID_SHARD", _memory(iig, rows.get("fsdp_hybrid")), 0.76, False),
            Bar("paro_ggg, times as fast as FSDP FULL_SHARD", _speed(sharded, ggg), 1.3, True),
            Bar("paro_ggg, memory of FSDP FULL_SHARD", _memory(ggg, sharded), 0.82, False),
            Bar("best PaRO, of compute floor + legs", mine.step_s / limit if mine and limit else None, 1.15, False),
        ]
    if model in LLAMA and accumulate == 8 and gpus == 4:
        bars += [Bar("best PaRO, of the compute floor", _speed(mine, floor), 1.10, False)]
    return bars


def even_bars(rows: Rows) -> list[Bar]:
    """The bars inside one host: no slower than torch's own, and in no more memory."""
    pairs = (
        ("paro_ggg", "fully_shard_1d", 1.0),
        ("paro_nng", "ddp_zero", 1.0),
        ("paro_nnn", "ddp", 0.98),
    )
    bars = []
    for ours, peer, needed in pairs:
        mine, theirs = rows.get(ours), rows.get(peer)
        bars += [
            Bar(f"{ours}, times as fast as {peer}", _speed(theirs, mine), needed, True),
            Bar(f"{ours}, memory of {peer}", _memory(mine, theirs), 1.0, False),
        ]
    return bars
