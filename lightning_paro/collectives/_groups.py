"""One process group per role of a topology, created once, by all ranks, in one order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paro.collectives._progress import Progress
from lightning_paro.collectives._traffic import Traffic
from lightning_paro.topology import Topology

__all__ = ["ROLES", "ProcessGroups"]

ROLES = ("intra_gather", "intra_reduce", "inter", "world")


@dataclass(frozen=True)
class ProcessGroups:
    """The communicators of one rank. A role whose group has one member is None and costs nothing.

    Gathers and reduces inside a group have a communicator each, so that one can be under way beside the other.
    ``control`` is a gloo group over all ranks for the small host-side values that ranks agree on; it never touches
    the accelerator. ``world`` is the default process group.

    Attributes:
        traffic: Bytes that :func:`all_gather` and its like sent over these groups. An engine has a count of its own.
    """

    topology: Topology
    rank: int
    intra_gather: dist.ProcessGroup | None
    intra_reduce: dist.ProcessGroup | None
    inter: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    world: dist.ProcessGroup | None
    progress: Progress = field(default_factory=Progress, compare=False)
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    shared: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    """What is made once over these groups, such as lanes."""

    @classmethod
    def create(cls, topology: Topology, timeout: timedelta | None = None) -> ProcessGroups:
        """Create the groups of ``topology``, or hand out those already created over the same world. Collective.

        Raises:
            ValueError: If the topology's world size is not that of the default process group, on any rank, or if ranks
                do not agree on the group size.
        """
        present = dist.get_world_size() if dist.is_initialized() else 1
        if present == topology.world_size == 1:
            return cls(topology, 0, None, None, None, None, None)
        if present == 1:
            raise _other_size({topology.world_size}, 1)
        world = dist.group.WORLD
        control = _control_group(world, timeout)
        told: list[Any] = [None] * present
        dist.all_gather_object(told, (topology.world_size, topology.groups or topology.group_size), group=control)
        sizes, asked = zip(*told, strict=True)
        if {*sizes} != {present}:
            raise _other_size({*sizes}, present)
        if len(set(asked)) > 1:
            by_rank = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(asked))
            raise ValueError(
                f"the ranks do not agree on group_size ({by_rank}). HINT: it defaults to the number of ranks on a "
                "host; where hosts differ in that, pass one group_size on all of them."
            )
        known = _created.get(topology)
        if known is not None and known[0] is world:
            return known[1]

        rank = dist.get_rank()
        i, j = topology.coordinates(rank)
        rows = [topology.intra_ranks(k) for k in range(topology.num_groups)]
        columns = [topology.inter_ranks(k) for k in range(topology.group_size)]
        groups = cls(
            topology,
            rank,
            intra_gather=_new_groups(rows, timeout)[i],
            intra_reduce=_new_groups(rows, timeout)[i],
            inter=_new_groups(columns, timeout)[j],
            control=control,
            world=world,
        )
        _created[topology] = (world, groups)
        return groups

    def role_size(self, role: str) -> int:
        """Number of ranks in the group of a role: ``intra_gather``, ``intra_reduce``, ``inter`` or ``world``."""
        if role == "world":
            return self.topology.world_size
        return self.topology.num_groups if role == "inter" else self.topology.group_size

    @property
    def sends_out(self) -> bool:
        """Whether this rank's successor, in a ring of all ranks in their order, is in another group."""
        group, _ = self.topology.coordinates(self.rank)
        next_group, _ = self.topology.coordinates((self.rank + 1) % self.topology.world_size)
        return group != next_group


def _other_size(sizes: set[int], present: int) -> ValueError:
    return ValueError(
        f"the topology has {' or '.join(map(str, sorted(sizes)))} ranks, but the process group has {present}. HINT: "
        "start as many ranks, by torchrun or init_process_group, or use Topology(torch.distributed.get_world_size(), "
        "group_size) on all of them."
    )


# A communicator costs memory and seconds: a second Trainer over the same world gets the same ones.
_created: dict[Topology, tuple[object, ProcessGroups]] = {}
_controls: dict[object, dist.ProcessGroup] = {}


def _control_group(world: object, timeout: timedelta | None) -> dist.ProcessGroup:
    """The gloo group over all ranks of ``world``."""
    if world not in _controls:
        _controls.clear()
        _controls[world] = dist.new_group(backend="gloo", timeout=timeout)
    return _controls[world]


def _new_groups(ranks: list[list[int]], timeout: timedelta | None) -> list[dist.ProcessGroup | None]:
    if len(ranks[0]) == 1:
        return [None] * len(ranks)
    return [dist.new_group(members, timeout=timeout) for members in ranks]
