"""How fast the links of a posed cluster are, by the probe that users of the planner run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.lab.rank import Rank
from lightning_paro.planner import probe

__all__ = ["measure"]


def measure(rank: Rank) -> dict[str, Any]:
    """``bandwidths``, bytes per second between hosts for one column, inside a host, for all columns at once, and in a
    flat ring; and the ``samples`` that they are of.
    """
    measured = probe(rank.groups, rank.device, show_progress=False)
    return {"bandwidths": measured.network().bandwidths, "samples": [asdict(sample) for sample in measured.samples]}
