"""How fast the links of a posed cluster are, by the probe that users of the planner run."""

from __future__ import annotations

from benchmarks.lab.rank import Rank
from lightning_paro.planner import probe

__all__ = ["measure"]


def measure(rank: Rank) -> dict[str, float | None]:
    """Bytes per second between hosts for one column, inside a host, for all columns at once, and in a flat ring."""
    return probe(rank.groups, rank.device, show_progress=False).network().bandwidths
