"""The bandwidths that the guideline needs, measured over the process groups that training will use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.progress import track

from lightning_paro.collectives import Ladder, ProcessGroups, slowest
from lightning_paro.planner._cost import Network
from lightning_paro.topology import Topology

__all__ = ["Probe", "Sample", "probe"]

Links = Literal["inside", "between, one column", "between, all columns", "all, one flat ring"]
LINKS: tuple[Links, ...] = ("inside", "between, one column", "between, all columns", "all, one flat ring")
MIB = 2**20
SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
WARMUP, REPEATS = 2, 5
LONGEST_S = 1.0
"""What probably takes longer than this is not measured: over such links a smaller size says as much."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        links: Which links were busy.
        operation: ``"gather"`` or ``"reduce"``.
        nbytes: Size of the whole tensor of one group, column or ring.
        seconds: Median of several, each the slowest rank's.
        bandwidth: Bytes per second that each rank sent.
    """

    links: Links
    operation: Literal["gather", "reduce"]
    nbytes: int
    seconds: float
    bandwidth: float


@dataclass(frozen=True)
class Probe:
    """What was measured, the same on all ranks.

    Attributes:
        topology: Ranks and groups.
        device: Kind of device.
        samples: Every measurement.
    """

    topology: Topology
    device: str
    samples: tuple[Sample, ...]

    def bandwidth(self, links: Links) -> float:
        """Bytes per second of the largest size; infinite if there are no such links.

        Gathers and reductions move about as much in a step, so what counts is the mean of their times.
        """
        mine = sorted((s for s in self.samples if s.links == links), key=lambda sample: sample.nbytes)
        largest = {sample.operation: sample.bandwidth for sample in mine}
        return statistics.harmonic_mean([*largest.values()]) if largest else float("inf")

    def network(self) -> Network:
        """The measured network, for :func:`make_plan`."""
        inside, alone, *others = (self.bandwidth(links) for links in LINKS)
        together, ring = (None if speed == float("inf") else speed for speed in others)  # not links of their own
        return Network(self.topology, inter=alone, intra=inside, column=together, ring=ring)


def probe(
    groups: ProcessGroups,
    device: torch.device | str = "cpu",
    sizes: tuple[int, ...] = SIZES,
    show_progress: bool = True,
) -> Probe:
    """Time gathers and reductions inside groups, in one column, in all columns, and over all ranks flat. Collective.

    Args:
        groups: The process groups.
        device: Where tensors live.
        sizes: Bytes of the whole tensors, ascending. The largest decides; those that would take seconds are left out.
        show_progress: Whether rank 0 shows a progress bar.
    """
    topology = groups.topology
    ladder = Ladder(groups, device)
    ranks_of = _ranks_of(topology)
    cases = [
        (links, operation, size)
        for links in LINKS
        for operation in ("gather", "reduce")
        for size in sizes
        if ranks_of[links] > 1
    ]
    samples: list[Sample] = []
    bar = track(cases, "measuring the network", disable=not show_progress or groups.rank > 0, transient=True)
    for links, operation, size in bar:
        ranks = ranks_of[links]
        numel = -(-size // (4 * topology.world_size)) * topology.world_size
        before = [s for s in samples if (s.links, s.operation) == (links, operation)]
        if before and before[-1].seconds * 4 * numel / before[-1].nbytes > LONGEST_S:  # the same on all ranks
            continue
        run = _operation(ladder, links, operation, numel, torch.device(device))
        seconds = [slowest(groups, torch.device(device), run) for _ in range(WARMUP + REPEATS)][WARMUP:]
        median = statistics.median(seconds)
        samples.append(Sample(links, operation, 4 * numel, median, 4 * numel * (ranks - 1) / ranks / median))  # type: ignore[arg-type]
    return Probe(topology, torch.device(device).type, tuple(samples))


def _ranks_of(topology: Topology) -> dict[Links, int]:
    """Ranks of a collective over each kind of links; 1 where there are none, or where another kind is the same."""
    m, ng = topology.group_size, topology.num_groups
    columns, ring = (ng, m * ng) if m > 1 and ng > 1 else (1, 1)
    return {"inside": m, "between, one column": ng, "between, all columns": columns, "all, one flat ring": ring}


def _operation(ladder: Ladder, links: Links, operation: str, numel: int, device: torch.device) -> Callable[[], object]:
    """What a rank does for one measurement; nothing if the links are not its own."""
    topology, rank = ladder.groups.topology, ladder.groups.rank
    if links == "between, one column" and topology.coordinates(rank)[1] != 0:
        return lambda: None
    role = "inter"
    if links == "inside":
        role = f"intra_{operation}"
    elif links == "all, one flat ring":
        role = "world"
    whole = torch.zeros(numel, device=device)
    shard = torch.zeros(numel // ladder.groups.role_size(role), device=device)

    def steps() -> Iterator[Any]:
        yield role
        if operation == "gather":
            yield ladder.gather(role, [whole], [shard])
        else:
            yield from ladder.scatter(role, [shard], [whole])

    return lambda: ladder.lanes.start(steps(), "measuring the network").wait()
