"""One flat buffer on the ladder: its values, and its gradient on the way down."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
        self._scale = 1.0 / self.ladder.groups.topology.world_size
        self.staging: Tensor | None = None  # this micro-batch's own gradient, whole
        self.accumulator: Tensor | None = None  # at rung g
        self.gradient: Tensor | None = None  # at rung os
        self.open: set[int] = set()  # slots with something at g that no boundary has taken down to os, on some rank
        self.touched: set[int] = set()  # slots whose gradient arrived on this rank since the last boundary
        self.used: set[int] = set()  # slots with a gradient at os, the same on all ranks
        self.pending = 0
        self._expected: set[int] = set()
        self._arrived: set[int] = set()
        self._gradient_ghosts: dict[int, Tensor] = {}

    def freeze(self, keep_master: bool) -> None:
        """Trained so far, frozen now: gradients are given back as well."""
        self.clear(range(len(self.slots)))
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
        self._expected = {index for index, slot in enumerate(self.slots) if slot.parameter.requires_grad}
        self.pending = len(self._expected)
        if self.pending:
            self.unfreeze()

    def arrive(self, index: int) -> None:
        """Take the gradient autograd left on a parameter, divided by the number of ranks."""
        parameter = self.slots[index].parameter
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        with torch.no_grad():
            if self.partition.g is N:
                if self.accumulator is None:
                    dtype = self.policy.accumulator_dtype or self.master_dtype
                    self.accumulator = torch.zeros(self.numel, dtype=dtype, device=self.device)
                self._view(self.accumulator, self.slots[index]).add_(gradient, alpha=self._scale)
            else:
                if self.staging is None:
                    dtype = self.policy.intra_dtype or self.dtype
                    self.staging = torch.empty(self.numel, dtype=dtype, device=self.device)
                view = self._view(self.staging, self.slots[index])
                if index in self._arrived:
                    view.add_(gradient, alpha=self._scale)
                else:
                    torch.mul(gradient, self._scale, out=view)
        self.touched.add(index)
        if index not in self._arrived:
            self._arrived.add(index)
            self.pending -= 1

    def reduce(self, sync: bool) -> None:
        """Bring this micro-batch's gradient down to rung g and, at a boundary, all that is there down to rung os."""
        with torch.no_grad(), self._progress(f"reducing the gradient of unit '{self.unit}'"):
            g, os = self.partition.g, self.partition.os
            wires = {
                "intra_dtype": self.policy.intra_dtype or self.dtype,
                "inter_dtype": self.policy.inter_dtype or self.dtype,
            }
            if g is N:
                if not sync:
                    self.open |= self._expected
                    return
                dtype = self.policy.accumulator_dtype or self.master_dtype
                piece = (
                    torch.zeros(self.numel, dtype=dtype, device=self.device)
                    if self.accumulator is None
                    else self.accumulator
                )
            else:
                piece = self.ladder.descend(self._staged(), N, g, sync=False, **wires)
                if self.accumulator is not None:
                    piece = self.accumulator.add_(piece)
                if not sync:
                    self.accumulator = piece.to(self.policy.accumulator_dtype or self.master_dtype)
                    self.open |= self._expected
                    return
            self.accumulator = None
            self.open.clear()
            total = self.ladder.descend(piece, g, os, sync=True, **wires).to(self.master_dtype)
            self.gradient = total if self.gradient is None else self.gradient.add_(total)

    def _staged(self) -> Tensor:
        staging, self.staging = self.staging, None
        if staging is None:
            return torch.zeros(self.numel, dtype=self.policy.intra_dtype or self.dtype, device=self.device)
        end = 0
        for index, slot in enumerate(self.slots):  # zero the padding and whatever did not arrive
            if index in self._arrived:
                staging[end : slot.start].zero_()
                end = slot.start + slot.numel
        staging[end:].zero_()
        return staging

    def agree_on_used(self, used: Iterable[int]) -> None:
        """At a boundary: these slots were used since the last one, on any rank."""
        self.touched.clear()
        self.used.update(used)

    def show(self) -> None:
        """After a backward: hand what is at os to the optimizer's entries; show that parameters have a gradient."""
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
        removed = [index for index in shown if self.slots[index].parameter.grad is None]
        if removed:
            self.clear(removed)
        for index in shown:
            self.slots[index].parameter.grad = None

    def clear(self, indices: Iterable[int]) -> None:
        """Forget the gradient of some slots, at g and at os."""
        indices = set(indices)
        for index in indices:
            self.slots[index].parameter.grad = None
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

    def reset(self) -> None:
        """Drop what an interrupted backward left behind."""
        self.staging = None
        self.pending = 0
        self._arrived.clear()

    def nbytes(self) -> dict[str, int]:
        """Bytes this rank holds: ``parameters``, ``gradients``, ``master``; a view counts once."""
        gradients = sum(t.nbytes for t in (self.accumulator, self.gradient) if t is not None)
        master = self.master.nbytes if self.master.data_ptr() != self._os_view().data_ptr() else 0
        return {"parameters": self.shard.nbytes, "gradients": gradients, "master": master}


def _zero(flat: weakref.ref[Flat], index: int) -> None:
    """What ``zero_`` of a stand-in does; weak, because a parameter's gradient is out of the collector's sight."""
    here = flat()
    if here is not None:
        here.zero([index])
