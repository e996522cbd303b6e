"""Gradients on their way down: to rung g, and at a boundary on to rung os, while the backward goes on."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_paro.collectives import Ladder, Task, after
from lightning_paro.collectives._lanes import Steps
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._values import names_of
from lightning_paro.topology import Granularity

__all__ = ["Descent"]

N, I, G = Granularity  # noqa: E741

_IN_FLIGHT = 2
"""Buckets whose own gradients may wait to be summed inside the group; a faster backward waits for them."""

_HEAD_START = 4
"""Units of the next forward that may start before the last sums of a backward are waited for."""


class Descent:
    """Sums gradients over ranks while the backward goes on.

    Flats come in an order that is the same on all ranks and travel in buckets. A bucket is summed inside the group, is
    added up at rung g, and at a boundary summed between groups, each in a lane of its own: a slow network holds up
    neither the backward nor the sums inside the group.

    Args:
        ladder: Moves between granularities.
        bucket_bytes: Neighbours move together up to this many bytes, whole and in the compute dtype.
    """

    def __init__(self, ladder: Ladder, bucket_bytes: int) -> None:
        self._ladder = ladder
        self._bucket_bytes = bucket_bytes
        self._bucket: list[Flat] = []
        self._inside: deque[Task] = deque()
        self._between: list[Task] = []
        self._head_start = 0

    def add(self, flat: Flat, is_boundary: bool, follower: Flat | None) -> None:
        """All gradients of a flat that this backward brings are there.

        Args:
            flat: The flat.
            is_boundary: Whether they go down to rung os.
            follower: What probably comes next, the same on all ranks: what it does not fit to need not wait for it.
        """
        flat.take_gradients()
        if flat.partition.g is N and not is_boundary:
            flat.open |= flat.expected
            return
        if flat in self._bucket:  # its module ran several times
            return
        if not self._has_room_for(flat):
            self.flush(is_boundary)
        self._bucket.append(flat)
        if follower is None or not self._has_room_for(follower):
            self.flush(is_boundary)

    def flush(self, is_boundary: bool) -> None:
        """Do not wait for more neighbours."""
        bucket, self._bucket = self._bucket, []
        if bucket:
            with torch.no_grad():
                self._start(bucket, is_boundary)

    def end(self, is_boundary: bool) -> None:
        """End of a backward; what comes after a boundary sees all sums.

        The last sums inside the group may stay under way where nothing goes on from there: a forward can begin without
        them, and who asks for an accumulator waits by itself.
        """
        if is_boundary or self._between:
            self.wait()
        else:
            self._head_start = _HEAD_START

    def catch_up(self) -> None:
        """A forward goes on: after a few units free the memory of what the last backward has left under way."""
        if self._head_start:
            self._head_start -= 1
            if not self._head_start:
                self.wait()

    def wait(self) -> None:
        """What comes after this sees all sums."""
        self._head_start = 0
        for task in (*self._inside, *self._between):
            task.wait()
        self._inside.clear()
        self._between.clear()

    def cancel(self) -> None:
        """Forget an interrupted backward."""
        for task in (*self._inside, *self._between):
            task.cancel()
        self._bucket, self._between = [], []
        self._inside.clear()
        self._head_start = 0

    def _has_room_for(self, flat: Flat) -> bool:
        """Whether it can travel with what is in the bucket."""
        bucket = self._bucket
        return not bucket or (_are_alike(bucket[0], flat) and _size([*bucket, flat]) <= self._bucket_bytes)

    def _start(self, flats: list[Flat], is_boundary: bool) -> None:
        while len(self._inside) >= _IN_FLIGHT:
            self._inside.popleft().wait()
        lanes = self._ladder.lanes
        legs = [_Leg(flat, is_boundary, self._ladder) for flat in flats]
        names = names_of(flats)
        wholes, parts = [leg.whole for leg in legs], [leg.part for leg in legs]
        if flats[0].partition.g is not N:  # by one launch; what was accumulated whole has its scale
            torch._foreach_mul_(wholes, flats[0].scale)
        inside = lanes.start(self._sum_inside(legs), f"reducing the gradient of {names}", (*wholes, *parts))
        self._inside.append(inside)
        if is_boundary or flats[0].partition.g is G:
            steps = self._sum_between(legs, inside)
            kept = tuple(tensor for leg in legs for tensor in leg.used_between())
            self._between.append(lanes.start(steps, f"reducing the gradient of {names} between groups", kept))
        else:
            for flat in flats:
                flat.summing = inside

    def _sum_inside(self, legs: list[_Leg]) -> Steps:
        yield from self._ladder.sum_inside([leg.whole for leg in legs], [leg.part for leg in legs])
        for leg in legs:
            if leg.at_g is not None and leg.flat.partition.g is I:
                leg.at_g.add(leg.part)

    def _sum_between(self, legs: list[_Leg], inside: Task) -> Steps:
        flat = legs[0].flat
        g, os = flat.partition.g, flat.partition.os
        sums: list[Tensor] = []
        wire = flat.policy.sent_between(flat.own_dtype)
        steps = self._ladder.sum_between([leg.at_i for leg in legs], G if G in (g, os) else I, wire, sums)
        yield from after([inside], steps)
        if os is N:
            wholes = [leg.whole for leg in legs]
            yield from self._ladder.climb([total.to(flat.wire_dtype) for total in sums], I, wholes, N)
            sums = wholes
        for leg, total in zip(legs, sums, strict=True):
            if leg.at_g is not None and g is G:
                leg.at_g.add(total)
                total = leg.at_g.value
            if leg.at_os is not None:
                leg.at_os.add(total)


class _Total:
    """A running sum in memory of the computation, which lanes may write to."""

    def __init__(self, before: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._is_new = before is None
        self.value = torch.empty(numel, dtype=dtype, device=device) if before is None else before

    def add(self, addend: Tensor) -> None:
        if self._is_new:
            self.value.copy_(addend)
        else:
            self.value.add_(addend)
        self._is_new = False


class _Leg:
    """One flat of a bucket: what is summed, and where the sums are added.

    Attributes:
        flat: The flat.
        whole: This rank's addend.
        part: The group's sum of those, at I.
        at_g: The accumulator; None if gradients are whole, or if a boundary finds nothing to add to.
        at_os: The gradient for the optimizer, at a boundary.
    """

    def __init__(self, flat: Flat, is_boundary: bool, ladder: Ladder) -> None:
        self.flat = flat
        divide = ladder.groups.topology.divisor
        g, os = flat.partition.g, flat.partition.os
        self.whole = flat.take_addend()
        self.part = self.whole
        if ladder.groups.intra_reduce is not None:
            self.part = self.whole.new_empty(self.whole.numel() // divide(I))
        self.at_g = self.at_os = None
        if g is not N and (flat.accumulator is not None or not is_boundary):
            self.at_g = _Total(flat.accumulator, flat.numel // divide(g), flat.accumulator_dtype, flat.device)
        if is_boundary:
            self.at_os = _Total(flat.gradient, flat.numel // divide(os), flat.master_dtype, flat.device)
            flat.gradient, flat.accumulator = self.at_os.value, None
            flat.open.clear()
        else:
            assert self.at_g is not None
            flat.accumulator = self.at_g.value
            flat.open |= flat.expected

    @property
    def at_i(self) -> Tensor:
        """What is summed over the column."""
        return self.part if self.at_g is None or self.flat.partition.g is not I else self.at_g.value

    def used_between(self) -> list[Tensor]:
        """What the sum between groups reads, or writes before it is done."""
        used = [self.at_i]
        if self.at_g is not None:
            used.append(self.at_g.value)
        if self.flat.partition.os is N:
            used.append(self.whole)
        return used


def _are_alike(flat: Flat, other: Flat) -> bool:
    """Whether their gradients can travel together."""
    return flat.own_dtype == other.own_dtype


def _size(flats: list[Flat]) -> int:
    return sum(flat.nbytes_whole for flat in flats)
