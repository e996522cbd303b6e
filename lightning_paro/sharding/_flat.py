"""One flat buffer on the ladder: its values, and its gradient on the way down."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_paro.collectives import Task
from lightning_paro.sharding._ghost import gradient_ghost, is_gradient_ghost
from lightning_paro.sharding._values import FlatValues
from lightning_paro.topology import Granularity

__all__ = ["Flat"]

N = Granularity.N


class Flat(FlatValues):
    """Values and gradients of the parameters of a unit that share a dtype and were trainable, or frozen, at setup.

    Args:
        args: As for :class:`FlatValues`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = 1.0 / self.ladder.groups.topology.world_size
        self.staging: Tensor | None = None  # this micro-batch's own gradient, whole
        self.summing: Task | None = None  # to the accumulator, since the last backward
        self._accumulator: Tensor | None = None
        self.gradient: Tensor | None = None  # at rung os
        self.open: set[int] = set()  # slots with something at g that no boundary has taken down to os, on some rank
        self.touched: set[int] = set()  # slots whose gradient arrived on this rank since the last boundary
        self.used: set[int] = set()  # slots with a gradient at os, the same on all ranks
        self.pending = 0
        self.expected: set[int] = set()  # slots whose gradient the present backward may bring
        self._arrived: set[int] = set()
        self._gradient_ghosts: dict[int, Tensor] = {}

    @property
    def accumulator(self) -> Tensor | None:
        """What micro-batches have brought to rung g; whoever asks comes after the sums that are under way."""
        self._wait_for_sums()
        return self._accumulator

    @accumulator.setter
    def accumulator(self, value: Tensor | None) -> None:
        self._wait_for_sums()  # they write to the memory that is let go
        self._accumulator = value

    def _wait_for_sums(self) -> None:
        if self.summing is not None:
            self.summing.wait()
            self.summing = None

    def freeze(self, keep_master: bool) -> None:
        """Trained so far, frozen now: gradients are given back as well."""
        self.clear(self.indices)
        super().freeze(keep_master)

    def forsake(self) -> None:
        """Free the device, gradients included."""
        self.staging = self.accumulator = self.gradient = None
        for entry in self.entries:
            if entry is not None:
                entry.grad = None
        super().forsake()

    def expect(self) -> None:
        """Start of a backward: count the gradients that will arrive."""
        self._arrived.clear()
        with _not_asked():
            self.expected = {index for index, p in enumerate(self.shown.parameters) if p.requires_grad}
        self.pending = len(self.expected)
        if self.pending:
            self.unfreeze()

    def arrive(self, index: int) -> None:
        """A parameter has a gradient from autograd, which goes on adding to it until it is taken."""
        if index not in self._arrived:
            self._arrived.add(index)
            self.pending -= 1

    def take_gradients(self) -> None:
        """Bring what autograd left on the parameters to where it is summed from.

        That is the accumulator if gradients are whole on every rank (g=N), which holds them divided by the number of
        ranks, and a staging buffer otherwise.
        """
        with _not_asked():  # their unit may be released by now
            taken = {index: _taken(self.shown.parameters[index]) for index in sorted(self._arrived)}
        gradients = {index: gradient for index, gradient in taken.items() if gradient is not None}
        self.touched.update(gradients)
        self._arrived.clear()
        with torch.no_grad():
            if self.partition.g is not N:
                staged = self._staged(gradients, self.wire_dtype)
                self.staging = staged if self.staging is None else self.staging.add_(staged)
            elif gradients:
                if self.accumulator is None:
                    self.accumulator = torch.zeros(self.numel, dtype=self.accumulator_dtype, device=self.device)
                self.accumulator.add_(self._staged(gradients, self.dtype), alpha=self.scale)

    def take_addend(self) -> Tensor:
        """What goes down from here, whole and in the dtype in which it travels inside a group; it may be overwritten.

        That is this micro-batch's own gradient, or all that has been accumulated if that is whole (g=N), which is
        divided by the number of ranks already.
        """
        if self.partition.g is not N:
            addend, self.staging = self.staging, None
            assert addend is not None
            return addend
        if self.accumulator is None:
            return torch.zeros(self.numel, dtype=self.wire_dtype, device=self.device)
        return self.accumulator.to(self.wire_dtype)

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which gradients travel inside a group."""
        return self.policy.sent_inside(self.own_dtype)

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype in which gradients are added up at rung g."""
        return self.policy.accumulated_in(self.own_dtype)

    def _staged(self, gradients: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
        """Gradients as they lie in the flat buffer, by one launch; what has none is zero, and so is the padding."""
        pieces: list[Tensor] = []
        end = 0
        for index, gradient in gradients.items():
            slot = self.slots[index]
            if slot.start > end:
                pieces.append(self._zeros(slot.start - end, gradient.dtype))
            pieces.append(gradient.reshape(-1))
            end = slot.start + slot.numel
        if end < self.numel:
            pieces.append(self._zeros(self.numel - end, pieces[0].dtype if pieces else dtype))
        return torch.cat(pieces, out=torch.empty(self.numel, dtype=dtype, device=self.device))

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def agree_on_used(self, used: Iterable[int]) -> None:
        """At a boundary: these slots were used since the last one, on any rank."""
        self.touched.clear()
        self.used.update(used)

    def show(self) -> None:
        """After a backward: hand what is at os to the optimizer's entries; show that parameters have a gradient."""
        with _not_asked():
            self._show()

    def _show(self) -> None:
        for index in self.used | self.open:
            slot = self.slots[index]
            entry = self.entry(index) if index in self.used else None
            if entry is not None and self.gradient is not None:
                entry.grad = self._os_part(self.gradient, index)
                if self.partition.os is N and index not in self.open and entry.dtype == slot.parameter.dtype:
                    slot.parameter.grad = entry.grad
            if slot.parameter.grad is None:
                if index not in self._gradient_ghosts:
                    zero = functools.partial(_zero, weakref.ref(self), index)
                    self._gradient_ghosts[index] = gradient_ghost(slot.parameter, slot.name, zero)
                slot.parameter.grad = self._gradient_ghosts[index]

    def check_untouched(self, index: int) -> None:
        """Refuse a gradient that the user assigned to a module parameter: the optimizer would not see it."""
        shown = self.slots[index].parameter.grad
        if shown is None or is_gradient_ghost(shown):
            return
        entry = self.entries[index]
        if entry is None or entry.grad is None or shown.data_ptr() != entry.grad.data_ptr():
            raise RuntimeError(
                f"a gradient was assigned to parameter '{self.slots[index].name}', but the optimizer works on shards "
                "and would not see it. HINT: change gradients through "
                "`lightning_paro.state_access(trainer).trainable_shards()`, or give the loss another form."
            )

    def hide(self) -> None:
        """Before a backward: take the shown gradients off the parameters. One the user removed is cleared for good."""
        shown = self.used | self.open
        self.drop_removed()
        with _not_asked():
            for index in shown:
                self.shown.parameters[index].grad = None

    def drop_removed(self) -> None:
        """Clear gradients that the user has taken off the parameters since the backward."""
        removed = self.removed()
        if removed:
            self.clear(removed)

    def removed(self) -> list[int]:
        """Slots whose parameters show no gradient any more, where they were shown one."""
        with _not_asked():
            return [index for index in self.used | self.open if self.shown.parameters[index].grad is None]

    def clear(self, indices: Iterable[int]) -> None:
        """Forget the gradient of some slots, at g and at os."""
        indices = set(indices)
        with _not_asked():
            for index in indices:
                self.shown.parameters[index].grad = None
                entry = self.entries[index]
                if entry is not None:
                    entry.grad = None
        self.used -= indices
        self.touched -= indices
        self.open -= indices
        if not (self.used or self.open):
            self.accumulator = self.gradient = None
        self.zero(indices)

    def zero(self, indices: Iterable[int]) -> None:
        """Make the gradient of some slots zero, at g and at os."""
        for index in indices:
            slot = self.slots[index]
            if self.gradient is not None:
                self.gradient[slot.shard].zero_()
            if self.accumulator is not None:
                low, high = self._g_slice.start, self._g_slice.stop
                first, last = max(slot.start, low), min(slot.start + slot.numel, high)
                if first < last:
                    self.accumulator[first - low : last - low].zero_()

    def drop(self) -> None:
        """Forget every gradient, at any rung and on its way."""
        for index in self._arrived:
            self.slots[index].parameter.grad = None
        self.staging = None
        self.pending = 0
        self._arrived.clear()
        self.clear(self.indices)

    def nbytes(self) -> dict[str, int]:
        """Bytes this rank holds: ``parameters``, ``gradients``, ``master``; a view counts once."""
        gradients = sum(t.nbytes for t in (self.accumulator, self.gradient) if t is not None)
        parameters = 0 if self.is_cast else self.shard.nbytes
        master = self.master.nbytes if self.is_mastered else 0
        return {"parameters": parameters, "gradients": gradients, "master": master}


_not_asked = torch._C.DisableTorchFunctionSubclass
"""What a released parameter allows need not be asked of it one by one."""


def _taken(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter, taken off it; None if a hook of the user's has done that."""
    gradient = parameter.grad
    parameter.grad = None
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def _zero(flat: weakref.ref[Flat], index: int) -> None:
    """What ``zero_`` of a stand-in does; weak, because a parameter's gradient is out of the collector's sight."""
    here = flat()
    if here is not None:
        here.zero([index])
