"""The order of a backward: what is gathered, reduced and released when, the same on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import Tensor

from lightning_paro.sharding._descent import Descent
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._unit import Unit
from lightning_paro.topology import Granularity

__all__ = ["Backward"]


class Backward:
    """What one backward has still to do.

    Autograd undoes calls in the reverse order in which they were made. When the gradients of a unit's outputs are there
    the unit is *reached*, and of the units reached before nothing is left to do, unless one encloses the other: they
    are *passed*, that is released and reduced. Ranks reach the same units in the same order whichever parameters each
    of them used. Waiting for the parameters' gradients instead could hang: where one never comes, that rank would enter
    the next gather while the others are in the reduce.

    With whole parameters (p=N) there are no gathers to keep in step with, and flats are reduced in a fixed order as
    soon as their gradients are there.

    Args:
        units: All units of the engine.
        descent: Takes the gradients of a flat that are all there.
    """

    def __init__(self, units: list[Unit], descent: Descent) -> None:
        self.is_running = False
        self.flats: list[Flat] = []  # those that take part, in the order in which they are reduced if p=N
        self._all = [flat for unit in units for flat in unit.flats]
        self._descent = descent
        self._queue: dict[Flat, None] = {}  # in order
        self._reached: list[Unit] = []
        self._taking_part: frozenset[Flat] = frozenset()
        self._hooks: list[Any] = []
        self._unhooked = [(flat, index) for flat in self._all for index in flat.indices]
        self._is_boundary = False

    def listen(self) -> None:
        """Hook every parameter that requires a gradient by now; autograd refuses hooks on the others."""
        waiting, self._unhooked = self._unhooked, []
        for flat, index in waiting:
            parameter = flat.slots[index].parameter
            if parameter.requires_grad:
                hook = _arrival(weakref.ref(self), weakref.ref(flat), index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._unhooked.append((flat, index))

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, is_boundary: bool) -> None:
        """Start of a backward whose gradients go down to rung g, and on to rung os if it is a boundary."""
        for unit in list(self._reached):  # by a torch.autograd.grad in the forward
            self._pass(unit)
        self._is_boundary = is_boundary
        for flat in self._all:
            flat.hide()
            flat.expect()
        self._queue = {flat: None for flat in reversed(self._all) if flat.pending or (is_boundary and flat.open)}
        self.flats = list(self._queue)
        self._taking_part = frozenset(self._queue)
        self.is_running = True

    def reach(self, unit: Unit) -> None:
        """The gradients of the outputs of a unit's call are there."""
        for earlier in list(self._reached):
            if not (earlier is unit or unit.is_inside(earlier) or earlier.is_inside(unit)):
                self._pass(earlier, unit)
        if unit in self._reached:
            return
        self._reached.append(unit)
        for flat in unit.flats:
            if self.is_running and self._is_taken(flat):  # another call of it was passed
                flat.expect()
                self._queue[flat] = None

    def arrive(self, flat: Flat, index: int) -> None:
        """A parameter has its gradient.

        Raises:
            RuntimeError: If this is no backward that was begun, or if the flat has been reduced already.
        """
        if flat.shown.parameters[index].grad is None:  # frozen since the forward, or a hook of the user's dropped it
            return
        if self.is_running and flat.is_whole and not self._is_taken(flat):
            if flat.partition.p is Granularity.N:
                self._take_those_ready()  # before this one arrives: hooks of the user's may still look at it
            flat.arrive(index)
            return
        name = flat.slots[index].name
        if not self.is_running:
            raise RuntimeError(
                f"parameter '{name}' received a gradient outside of a bracketed backward. HINT: in manual optimization "
                "call `self.manual_backward(loss)` instead of `loss.backward()`."
            )
        if self._is_taken(flat):
            raise RuntimeError(
                f"parameter '{name}' received a second gradient in one backward, after its unit was reduced: a "
                "reentrant checkpoint runs it twice. HINT: use_reentrant=False."
            )
        raise RuntimeError(
            f"parameter '{name}' received a gradient while unit '{flat.unit}' was released, so the gradients that "
            "come after it are of values that were not there: the loss depends on the unit by something that its "
            "forward does not return. HINT: return it, or make the module that uses it the unit, "
            "ParoStrategy(units={...}), or keep parameters whole with p=N, such as paro_nig."
        )

    def end(self) -> None:
        """All gradients are there: start to reduce what is left."""
        self.is_running = False
        while self._queue:
            self._take(next(iter(self._queue)))
        self._descent.flush(self._is_boundary)
        self._reached.clear()

    def reset(self) -> None:
        """Forget an interrupted backward."""
        self.is_running = False
        self._queue.clear()
        self._reached.clear()

    def _is_taken(self, flat: Flat) -> bool:
        return flat in self._taking_part and flat not in self._queue

    def _take(self, flat: Flat, follower: Flat | None = None) -> None:
        del self._queue[flat]
        self._descent.add(flat, self._is_boundary, follower or next(iter(self._queue), None))

    def _take_those_ready(self) -> None:
        while self._queue:
            flat = next(iter(self._queue))
            if flat.pending:
                return
            self._take(flat)

    def _pass(self, unit: Unit, reached: Unit | None = None) -> None:
        self._reached.remove(unit)
        unit.leave()
        if unit.is_kept:
            return
        coming = [flat for flat in (*unit.flats, *(reached.flats if reached else ())) if flat in self._queue]
        for flat, follower in zip_longest(coming, coming[1:]):
            if flat in unit.flats:
                self._take(flat, follower)


def _arrival(backward: weakref.ref[Backward], flat: weakref.ref[Flat], index: int) -> Callable[[Tensor], None]:
    """A hook that owns nothing that owns its parameter: that would be a cycle the collector never frees."""

    def hook(_: Tensor) -> None:
        here, where = backward(), flat()
        if here is not None and where is not None:
            here.arrive(where, index)

    return hook
