"""Values that say who holds what: granularities, partitions and topologies.

Nothing here touches ``torch.distributed``; everything can be computed, printed and tested in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product

__all__ = ["Granularity", "Partition", "Topology"]


class Granularity(IntEnum):
    """How finely one kind of model state is split over the ranks (PaRO, section 3)."""

    N = 0
    """Not partitioned: whole on every rank."""
    I = 1  # noqa: E741 - the paper's letter
    """Partitioned inside a group of ranks, repeated in every group."""
    G = 2
    """Partitioned globally, over all ranks."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Partition:
    """The granularities of parameters, gradients and optimizer state, written as three letters such as ``"iig"``.

    Args:
        p: Granularity of the parameters.
        g: Granularity of the accumulated gradients.
        os: Granularity of the optimizer state and of the master weights.

    Raises:
        ValueError: If ``os`` is coarser than ``p`` or ``g``. That rule leaves 14 of the 27 combinations
            (PaRO, section 3).
    """

    p: Granularity
    g: Granularity
    os: Granularity

    def __post_init__(self) -> None:
        if self.os < max(self.p, self.g):
            near = ", ".join(f"paro_{other}" for other in self.neighbours())
            raise ValueError(
                f"'{self}' is not a useful partition: the optimizer state must be split at least as finely as "
                f"parameters and gradients, os >= max(p, g) with N < I < G, but os={self.os.name} is coarser than "
                f"max(p={self.p.name}, g={self.g.name})={max(self.p, self.g).name}. A coarser optimizer state costs "
                f"memory and saves no communication. HINT: the nearest valid names are {near}."
            )

    def __str__(self) -> str:
        return f"{self.p}{self.g}{self.os}"

    @classmethod
    def parse(cls, name: str | Partition) -> Partition:
        """Read a partition from its name, with or without the prefix ``paro_``, in upper or lower case.

        Raises:
            ValueError: If the name is not three letters out of N, I and G, or breaks the rule of :class:`Partition`.
        """
        if isinstance(name, Partition):
            return name
        letters = str(name).strip().lower().removeprefix("paro_")
        if len(letters) != 3 or set(letters) - set("nig"):
            raise ValueError(
                f"{name!r} is not a partition: expected three letters out of n, i and g for parameters, gradients and "
                f"optimizer state. HINT: valid names are {', '.join(str(partition) for partition in cls.valid())}."
            )
        return cls(*(Granularity[letter.upper()] for letter in letters))

    @classmethod
    def valid(cls) -> list[Partition]:
        """The 14 partitions that obey the rule, coarsest first."""
        return [cls(p, g, os) for p, g, os in product(Granularity, repeat=3) if os >= max(p, g)]

    @classmethod
    def refused(cls) -> list[str]:
        """The names of the 13 combinations that break the rule."""
        return [f"{p}{g}{os}" for p, g, os in product(Granularity, repeat=3) if os < max(p, g)]

    def neighbours(self) -> list[str]:
        """Valid names that differ from this one in as few rungs as possible."""

        def distance(other: Partition) -> int:
            return abs(self.p - other.p) + abs(self.g - other.g) + abs(self.os - other.os)

        nearest = min(distance(other) for other in Partition.valid())
        return [str(other) for other in Partition.valid() if distance(other) == nearest]


@dataclass(frozen=True)
class Topology:
    """``world_size`` ranks in groups of ``group_size``; rank ``r = i * group_size + j`` is member j of group i.

    The *intra* group of i is its ``group_size`` ranks. The *inter* group (a column) of j is the ranks that have the
    same j in every group.

    Attributes:
        world_size: Number of ranks.
        group_size: Ranks of a group.
        groups: The ranks of every group, where neighbours are not what belongs together, see :meth:`of_groups`; empty
            for groups of neighbours.

    Raises:
        ValueError: If the group size does not divide the world size, or the groups are not what :meth:`of_groups` asks.
    """

    world_size: int
    group_size: int
    groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]]) -> Topology:
        """A topology of explicit groups, for example ``[[0, 2], [1, 3]]`` where a launcher deals ranks out to hosts.

        Args:
            groups: The ranks of every group: every rank once, as many in each group, each group in ascending order,
                and so the j-th ranks of the groups, one group after the other.

        Raises:
            ValueError: If they are not.
        """
        _check_lists(groups)
        sizes = sorted({len(group) for group in groups})
        if len(sizes) != 1:
            raise ValueError(
                f"there are groups of {sizes or 'no'} ranks. Every group must have the same number of ranks."
            )
        return cls(sum(len(group) for group in groups), sizes[0], tuple(tuple(group) for group in groups))

    def __post_init__(self) -> None:
        _check_lists(self.groups)
        object.__setattr__(self, "groups", tuple(tuple(group) for group in self.groups))
        self._check_sizes()
        if self.groups:
            self._check_groups()

    def _check_groups(self) -> None:
        groups = self.groups
        ranks = [rank for group in groups for rank in group]
        if sorted(ranks) != list(range(self.world_size)) or {len(group) for group in groups} != {self.group_size}:
            raise ValueError(
                f"groups={[list(group) for group in groups]} must hold each of the ranks 0 to {self.world_size - 1} "
                f"once, {self.group_size} in each group."
            )
        rows, columns = list(groups), list(zip(*groups, strict=True))
        for kind, members in [("group", row) for row in rows] + [("column", column) for column in columns]:
            if list(members) != sorted(members):
                raise ValueError(
                    f"the ranks of a {kind} must ascend, got {list(members)} in groups={[list(g) for g in groups]}. "
                    "HINT: list the groups in the order of their first ranks, each in ascending order."
                )
        is_default = ranks == list(range(self.world_size))
        object.__setattr__(self, "groups", () if is_default else groups)  # equal topologies are equal

    def _check_sizes(self) -> None:
        n, m = self.world_size, self.group_size
        for name, value in (("world_size", n), ("group_size", m)):
            if type(value) is not int:
                raise ValueError(f"{name}={value!r} must be a whole number of ranks, got {type(value).__name__}.")
        if n < 1:
            raise ValueError(f"world_size must be at least 1, got {n}. HINT: pass the number of ranks.")
        if m < 1 or n % m:
            divisors = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
            remainder = f"{n} = {n // m} * {m} + {n % m}" if m >= 1 else f"{m} < 1"
            raise ValueError(
                f"group_size={m} does not divide world_size={n}: {remainder}. Every group must have the same number "
                f"of ranks. HINT: choose group_size from {{{divisors}}}."
            )

    @property
    def num_groups(self) -> int:
        """Number of groups, ``world_size / group_size``."""
        return self.world_size // self.group_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The group index i and the member index j of ``rank``."""
        for i, group in enumerate(self.groups):
            if rank in group:
                return i, group.index(rank)
        return divmod(rank, self.group_size)

    def intra_ranks(self, i: int) -> list[int]:
        """The ranks of group ``i``."""
        if self.groups:
            return list(self.groups[i])
        return [i * self.group_size + j for j in range(self.group_size)]

    def inter_ranks(self, j: int) -> list[int]:
        """The ranks of column ``j``: member j of every group."""
        return [self.intra_ranks(i)[j] for i in range(self.num_groups)]

    def divisor(self, granularity: Granularity) -> int:
        """Into how many equal shards a granularity splits a buffer: 1, group_size or world_size."""
        return (1, self.group_size, self.world_size)[granularity]

    def shard(self, granularity: Granularity, rank: int, numel: int) -> slice:
        """Where the shard of ``rank`` lies in a flat buffer of ``numel`` elements.

        The buffer is n equal blocks. The I-shard of j is the contiguous blocks ``j*ng .. j*ng+ng-1`` and the G-shard
        of (i, j) is block ``j*ng+i``, so a G-shard always lies inside the I-shard of its rank and every climb or
        descent between granularities is one contiguous collective.

        Raises:
            ValueError: If ``numel`` is not a multiple of the world size.
        """
        if numel % self.world_size:
            raise ValueError(
                f"a buffer of {numel} elements does not divide into {self.world_size} blocks; pad it first."
            )
        i, j = self.coordinates(rank)
        length = numel // self.divisor(granularity)
        index = (0, j, j * self.num_groups + i)[granularity]
        return slice(index * length, (index + 1) * length)

    def effective(self, partition: Partition) -> Partition:
        """The partition that physically runs: rungs that are empty in this topology fall on their neighbour.

        With groups of one rank I equals N; with a single group G equals I; with one rank everything is N.
        """

        def fall(granularity: Granularity) -> Granularity:
            if granularity is Granularity.G and self.num_groups == 1:
                granularity = Granularity.I
            if granularity is Granularity.I and self.group_size == 1:
                granularity = Granularity.N
            return granularity

        return Partition(fall(partition.p), fall(partition.g), fall(partition.os))

    def explain(self, partition: Partition, state_bytes: float | None = None) -> str | None:
        """One line that says which rungs are empty in this topology, or None if there are none.

        Args:
            partition: The partition the user asked for.
            state_bytes: Model-state bytes a rank will hold, to be named in the line.
        """
        effective = self.effective(partition)
        if effective == partition:
            return None
        ng, m = self.num_groups, self.group_size
        why = "there is one rank" if self.world_size == 1 else "G equals I" if ng == 1 else "I equals N"
        memory = f", {_readable(state_bytes)} of model state a rank" if state_bytes is not None else ""
        line = (
            f"{partition} on {ng} group{'s' * (ng > 1)} x {m} rank{'s' * (m > 1)}: {why}, runs as {effective}{memory}"
        )
        if m == 1 and self.world_size > 1 and Granularity.I in (partition.p, partition.g, partition.os):
            line += "; for sharding use paro_ggg or a larger group_size"
        return line


def _readable(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _check_lists(groups: Sequence[Sequence[int]]) -> None:
    if not all(isinstance(group, Sequence) and all(type(rank) is int for rank in group) for group in groups):
        raise ValueError(f"groups={groups!r} must be lists of ranks. HINT: for example [[0, 2], [1, 3]].")
