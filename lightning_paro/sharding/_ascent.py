"""Values on their way up: gathered ahead of the computation, in the order in which the last step needed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from lightning_paro.collectives import Ladder
from lightning_paro.collectives._lanes import Steps
from lightning_paro.sharding._accord import Accord
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._unit import Unit
from lightning_paro.sharding._values import gather_all, names_of
from lightning_paro.topology import Granularity

__all__ = ["Ascent", "in_buckets"]

N = Granularity.N

_END = -1
"""Among the indices of units: the end of a backward, where everything is let go."""


class Ascent:
    """Makes units whole when they are needed, and the ones after them under way by then.

    What will be needed next is what was needed next in the step before. Ranks that run the same units, as they must,
    look ahead alike, so no rank gathers alone; a unit gathered in vain is only let go. Neighbours travel in *buckets*,
    by one launch. At most one bucket in use and one ahead of it are whole.

    Args:
        units: All units of the engine.
        ladder: Moves between granularities.
        bucket_bytes: Neighbours move together up to this many bytes, whole and in the compute dtype.
        accord: Knows the path of this rank, and makes sure that it is that of all where a step is the first to differ
            from the last one: a rank that differs alone would gather something else than the others.
    """

    def __init__(self, units: list[Unit], ladder: Ladder, bucket_bytes: int, accord: Accord) -> None:
        self._accord = accord
        self._units = units
        self._order = {id(flat): place for place, flat in enumerate(flat for unit in units for flat in unit.flats)}
        self._ladder = ladder
        self._bucket_bytes = bucket_bytes
        self._last: list[int] = []  # needed in the step before
        self._now: list[int] = []  # needed in this one so far
        self._on_track = False  # whether those are the beginning of that
        self._ahead: dict[int, int] = {}  # units gathered before they are needed, and by which launch
        self._launches = 0
        self._kept: Unit | None = None
        topology = ladder.groups.topology
        has_two_legs = topology.num_groups > 1 and topology.group_size > 1
        self._waits_alone = not (ladder.lanes.is_async and has_two_legs)
        """Whether a rank may wait for an update by itself: on the host the second leg is issued by who waits."""

    @property
    def is_first(self) -> bool:
        """Whether no step before this one says what it needs."""
        return not self._last

    def step_begin(self) -> None:
        """Start of a step: what the last one needed is what this one will."""
        self.forget()
        if self._now:
            self._last, self._now = self._now, []
        self._on_track = bool(self._last)

    def forget(self) -> None:
        """Nothing is ahead any more: the units have been let go."""
        self._ahead.clear()
        self._kept = None

    def backward_end(self) -> None:
        """End of a backward: what comes after it is gathered after it."""
        self.forget()
        self._follow(_END)

    def discard(self) -> None:
        """Values are about to change: what has been gathered ahead would be of the old ones."""
        for index in self._ahead:
            for flat in self._units[index].flats:
                flat.discard_arrival()
        self._ahead.clear()

    def abort(self) -> None:
        """An interrupted step says nothing about the next."""
        self.forget()
        self._last, self._now, self._on_track = [], [], False

    def need(self, unit: Unit) -> None:
        """Make a unit whole for what is computed next, and start to gather what comes after it."""
        kept, self._kept = self._kept, None
        if kept is not None and kept is not unit:
            kept.release_if_idle()
        launch = self._ahead.pop(unit.index, None)
        if unit.is_whole and launch is None and kept is not unit:
            return
        self._accord.path.append(unit.index)
        self._follow(unit.index)
        if not unit.is_whole:
            if not unit.is_arriving:
                self._gather([unit])
            unit.arrive()
        if self._on_track and all(other == launch for other in self._ahead.values()):
            self._look_ahead(unit)

    def keeps(self, unit: Unit) -> bool:
        """Whether an idle unit stays whole because it is the very next that is needed, as at the turn to backward."""
        if self._on_track and self._now and self._now[-1] == unit.index == self._next():
            self._kept = unit
        return self._kept is unit

    def update(self, moved: Mapping[Flat, Iterable[int]]) -> None:
        """After a step: the new values climb from rung os to rung p, and on to N where a unit is whole just now.

        In module order, which is that of a forward, whatever the optimizer's; the rest, which a step begins with,
        comes first.
        """
        flats = sorted(moved, key=lambda flat: self._order[id(flat)])
        for bucket in in_buckets(flats, self._bucket_bytes):
            self._update(bucket)
        for flat in flats:
            flat.have_moved(moved[flat])
            if flat.partition.p is not N:
                if flat.is_whole:
                    flat.gather(again=True)
            elif flat.partition.os is not N and self._waits_alone:
                flat.settle_when_asked()
            else:
                flat.settle()

    def _follow(self, index: int) -> None:
        if self._on_track and self._next() != index:
            self._on_track = False
            if index != _END:
                self._accord.compare_paths()
        self._now.append(index)

    def _next(self) -> int | None:
        position = len(self._now)
        return self._last[position] if position < len(self._last) else None

    def _look_ahead(self, unit: Unit) -> None:
        """Gather the next bucket: from the first unit on that will not be whole when it is needed."""
        position = len(self._now)
        present = set(self._ahead)
        if self._next() == unit.index:
            present.add(unit.index)
        bucket: list[Unit] = []
        size = 0
        for place, index in enumerate(self._last[position:], position):
            if index == _END:
                break
            candidate = self._units[index]
            if candidate.holds:
                continue
            if index in present:  # used here, and let go after it unless it is the next again
                if self._last[place + 1 : place + 2] != [index]:
                    present.discard(index)
                if bucket:
                    break
                continue
            size += candidate.nbytes_whole
            if candidate.is_whole or candidate.is_arriving or candidate in bucket:
                break
            if bucket and size > self._bucket_bytes:
                break
            bucket.append(candidate)
        if bucket:
            self._launches += 1
            self._ahead |= dict.fromkeys((ahead.index for ahead in bucket), self._launches)
            self._gather(bucket)

    def _gather(self, units: list[Unit]) -> None:
        for flats in _alike(flat for unit in units for flat in unit.flats if not flat.is_whole):
            gather_all(flats)

    def _update(self, flats: list[Flat]) -> None:
        for alike in _alike(flats):
            for flat in alike:
                flat.settle()
            with torch.no_grad():
                task = self._ladder.lanes.start(self._updating(alike), f"updating {names_of(alike)} after a step")
            for flat in alike:
                flat.update = task

    def _updating(self, flats: list[Flat]) -> Steps:
        partition = flats[0].partition
        slices = [flat.os_view() for flat in flats]
        masters = [flat.master for flat in flats]
        if masters[0].data_ptr() != slices[0].data_ptr():
            torch._foreach_copy_(slices, masters)
        yield from self._ladder.climb(slices, partition.os, [flat.shard for flat in flats], partition.p)


def in_buckets(flats: Iterable[Flat], nbytes: int) -> Iterator[list[Flat]]:
    """Neighbours, together up to ``nbytes``, whole and in the compute dtype; at least one."""
    bucket: list[Flat] = []
    size = 0
    for flat in flats:
        if bucket and size + flat.nbytes_whole > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(flat)
        size += flat.nbytes_whole
    if bucket:
        yield bucket


def _alike(flats: Iterable[Flat]) -> Iterator[list[Flat]]:
    """By dtype: what moves together has to have one, and one for its masters."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[Flat]] = {}
    for flat in flats:
        by_dtype.setdefault((flat.dtype, flat.master.dtype), []).append(flat)
    yield from by_dtype.values()
