"""From costs to a choice: the fastest partition that fits, ties by memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_paro.planner._cost import Algorithm, Cost, Network, Workload, cost, hpz
from lightning_paro.topology import Partition, Topology

__all__ = ["MARGIN", "Peer", "Plan", "Row", "make_plan", "scale"]

MARGIN = 1.05
"""What must fit is the predicted peak and 5 %: fragments, workspaces, what nobody counts."""

_TIE = 1e-6  # relative: sums of the same terms in another order

_PEERS = {  # by the partition that holds and moves the same, on flat rings
    "DDP": "nnn",
    "ZeRO-1": "nng",
    "ZeRO-2": "ngg",
    "ZeRO-3, FSDP": "ggg",
    "HSDP, MiCS": "iii",
}


@dataclass(frozen=True)
class Row:
    """One partition in a plan.

    Attributes:
        partition: The three granularities.
        runs_as: What physically runs in this topology; the same unless a rung is empty.
        cost: Memory and time.
        fits: Whether the peak and a margin of 5 % are within the memory.
    """

    partition: Partition
    runs_as: Partition
    cost: Cost
    fits: bool


@dataclass(frozen=True)
class Peer:
    """A strategy of another library, by the same formulas on flat rings."""

    name: str
    cost: Cost
    fits: bool


@dataclass(frozen=True)
class Plan:
    """Every partition with its cost.

    Attributes:
        workload: What is trained.
        network: Where.
        memory: Bytes of memory of a rank.
        algorithm: How collectives over all ranks are done.
        rows: All 14 partitions, the recommended order: those that fit first, fastest first.
        peers: Other libraries' strategies, in the same order.
    """

    workload: Workload
    network: Network
    memory: float
    algorithm: Algorithm
    rows: list[Row]
    peers: list[Peer]

    @property
    def recommended(self) -> Row | None:
        """The fastest row that fits, of equally fast ones that with the least memory; None if nothing fits."""
        return self.rows[0] if self.rows[0].fits else None

    def frontier(self) -> list[Row]:
        """The rows that no other beats in both memory and time, from the smallest memory on."""
        best: list[Row] = []
        for row in sorted(self.rows, key=lambda row: (row.cost.memory_bytes, row.cost.step_s)):
            if not best or row.cost.step_s < best[-1].cost.step_s * (1 - _TIE):
                best.append(row)
        return best


def make_plan(workload: Workload, network: Network, memory: float, algorithm: Algorithm = "paro-cc") -> Plan:
    """Cost all 14 partitions, and their peers, and sort them (PaRO, section 3.4).

    Args:
        workload: What is trained.
        network: Where.
        memory: Bytes of memory of the smallest rank.
        algorithm: How collectives over all ranks are done.

    Raises:
        ValueError: If the memory is not positive.
    """
    if not memory > 0:
        raise ValueError(f"the memory of a rank must be positive, got {memory}. HINT: give bytes.")

    def fits(spent: Cost) -> bool:
        return spent.memory_bytes * MARGIN <= memory

    rows = []
    for partition in Partition.valid():
        spent = cost(partition, workload, network, algorithm)
        rows.append(Row(partition, network.topology.effective(partition), spent, fits(spent)))
    costs = {name: cost(Partition.parse(p), workload, network, "flat") for name, p in _PEERS.items()}
    costs["ZeRO++ hpZ"] = hpz(workload, network)
    peers = [Peer(name, spent, fits(spent)) for name, spent in costs.items()]
    return Plan(workload, network, memory, algorithm, _in_order(rows), sorted(peers, key=_key))


def scale(
    workload: Workload, network: Network, memory: float, worlds: Iterable[int], algorithm: Algorithm = "paro-cc"
) -> list[Plan]:
    """The same plan for other numbers of ranks, in groups of the same size and with the same work for each rank.

    Raises:
        ValueError: If the group size does not divide one of ``worlds``.
    """
    size = network.topology.group_size
    return [
        make_plan(workload, replace(network, topology=Topology(world, size)), memory, algorithm) for world in worlds
    ]


def _key(row: Row | Peer) -> tuple[bool, float, float]:
    return not row.fits, row.cost.step_s, row.cost.memory_bytes


def _in_order(rows: list[Row]) -> list[Row]:
    """Those that fit first, then by time, and by memory among rows of equal time."""
    ordered = sorted(rows, key=_key)
    result: list[Row] = []
    while ordered:
        first = ordered[0]
        ties = [r for r in ordered if r.fits == first.fits and r.cost.step_s <= first.cost.step_s * (1 + _TIE)]
        result += sorted(ties, key=lambda row: row.cost.memory_bytes)
        ordered = ordered[len(ties) :]
    return result
