"""One flat buffer on the ladder: its parameter shard, its gradient on the way down, its master weights."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_paro.collectives import Ladder
from lightning_paro.sharding._ghost import gradient_ghost, is_gradient_ghost, mark_released, mark_whole, nan_ghost
from lightning_paro.sharding._policy import PrecisionPolicy
from lightning_paro.topology import Granularity, Partition

__all__ = ["Flat", "Slot"]

N, I, G = Granularity  # noqa: E741

_ALIGNMENT = 8  # elements: every parameter of a 2-byte buffer starts at a multiple of 16 bytes


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a flat buffer, and which part of it is in this rank's optimizer shard.

    Attributes:
        name: The parameter's first name in the root module.
        parameter: The module's own parameter.
        start: First element in the flat buffer.
        numel: Number of elements.
        shape: Shape of the whole parameter.
        shard: Elements of this rank's optimizer shard that belong to the parameter; empty if none do.
        offset: Which element of the flattened parameter the shard starts with.
    """

    name: str
    parameter: nn.Parameter
    start: int
    numel: int
    shape: torch.Size
    shard: slice
    offset: int

    @property
    def is_empty(self) -> bool:
        """Whether this rank's optimizer shard holds nothing of the parameter; one without elements is on every rank."""
        return self.numel > 0 and bool(self.shard.start == self.shard.stop)


class Flat:
    """The parameters of a unit that share a dtype and were trainable, or frozen, at setup.

    Args:
        unit: Name of the unit, for messages.
        parameters: Names and parameters, in layout order.
        partition: The effective partition.
        policy: Dtypes.
        ladder: Moves between granularities; knows topology and rank.
        device: Where the buffers live.
    """

    def __init__(
        self,
        unit: str,
        parameters: list[tuple[str, nn.Parameter]],
        partition: Partition,
        policy: PrecisionPolicy,
        ladder: Ladder,
        device: torch.device,
    ) -> None:
        self.unit = unit
        self.partition = partition
        self.policy = policy
        self.ladder = ladder
        self._progress = ladder.groups.progress.enter
        self.device = device
        self.own_dtype = parameters[0][1].dtype
        self.dtype = policy.compute_dtype(self.own_dtype)
        self.master_dtype = policy.master_dtype(self.own_dtype)
        self.trainable = parameters[0][1].requires_grad
        topology, rank = ladder.groups.topology, ladder.groups.rank
        self._scale = 1.0 / topology.world_size

        ends, end = [], 0
        for _, parameter in parameters:
            ends.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        block = topology.world_size * _ALIGNMENT
        self.numel = max(-(-end // block) * block, block)
        self._p_slice, self._g_slice, self._os_slice = (
            topology.shard(granularity, rank, self.numel) for granularity in (partition.p, partition.g, partition.os)
        )
        self.slots = [self._slot(name, p, start) for (name, p), start in zip(parameters, ends, strict=True)]

        self._load(parameters)
        self.entries: list[nn.Parameter | None] = [None] * len(self.slots)
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

    def _slot(self, name: str, parameter: nn.Parameter, start: int) -> Slot:
        stop = start + parameter.numel()
        low, high = self._os_slice.start, self._os_slice.stop
        first, last = max(start, low), min(stop, high)
        shard = slice(first - low, last - low) if first < last else slice(0, 0)
        return Slot(name, parameter, start, parameter.numel(), parameter.shape, shard, max(first - start, 0))

    # ---- parameters -----------------------------------------------------------------------------------------

    def _load(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Build the shards from rank 0's values, one flat buffer at a time."""
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.zeros(self.numel, dtype=self.own_dtype, device=self.device)
            if self.ladder.groups.rank == 0:
                for slot in self.slots:
                    self._view(whole, slot).copy_(slot.parameter)
            if self.ladder.groups.topology.world_size > 1:
                torch.distributed.broadcast(whole, src=0)
            is_p_whole = self.partition.p is N
            self.shard = whole[self._p_slice].to(self.dtype, copy=not is_p_whole)
            self.master = whole[self._os_slice].clone() if self.trainable and self.has_master else self._os_view()
            if is_p_whole:
                self.whole = self.shard
            else:
                self.whole = torch.empty(self.numel, dtype=self.dtype, device=self.device)
                self._storage_bytes = self.whole.untyped_storage().nbytes()
                self._ghosts = [nan_ghost(slot.shape, self.dtype, self.device) for slot in self.slots]
            self._views = [self._view(self.whole, slot) for slot in self.slots]
        self.is_whole = True
        self.attach()
        if not is_p_whole:
            self.release()

    @property
    def has_master(self) -> bool:
        """Whether the optimizer's values are a copy of their own rather than a view of the parameter shard."""
        return self.master_dtype != self.dtype

    def _view(self, whole: Tensor, slot: Slot) -> Tensor:
        return whole[slot.start : slot.start + slot.numel].view(slot.shape)

    def _os_view(self) -> Tensor:
        offset = self._os_slice.start - self._p_slice.start
        return self.shard[offset : offset + self._os_slice.stop - self._os_slice.start]

    def attach(self) -> None:
        """Let the module's parameters show the whole values."""
        for slot, view in zip(self.slots, self._views, strict=True):
            mark_whole(slot.parameter)
            slot.parameter.data = view  # not a Parameter made of the view: that would share its version counter

    def gather(self, again: bool = False) -> None:
        """Climb from rung p to N, into the same storage every time: views that autograd saved stay valid.

        Args:
            again: Even if the whole values are there, because other ranks need this one to take part.
        """
        if self.is_whole and not again:
            return
        with torch.inference_mode(False), torch.no_grad():
            if not self.is_whole:
                self.whole.untyped_storage().resize_(self._storage_bytes)
            with self._progress(f"gathering unit '{self.unit}'"):
                self.ladder.climb(self.shard, self.partition.p, self.whole, N)
        self.is_whole = True
        self.attach()

    def release(self) -> None:
        """Give the whole values back; the parameters become ghosts that keep shape, dtype and identity."""
        if not self.is_whole or self.partition.p is N:
            return
        self.is_whole = False
        self._haunt()
        if not self.whole.untyped_storage().resizable():  # somebody has seen a view of it as a numpy array
            with torch.inference_mode(False):
                self.whole = torch.empty_like(self.whole)
                self._views = [self._view(self.whole, slot) for slot in self.slots]
        self.whole.untyped_storage().resize_(0)

    def _haunt(self) -> None:
        for slot, ghost in zip(self.slots, self._ghosts, strict=True):
            slot.parameter.data = ghost
            mark_released(slot.parameter, f"parameter '{slot.name}' of unit '{self.unit}'")

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of the whole values."""
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()

    def update(self) -> None:
        """After a step: the new values climb from rung os to rung p, and on to N if the unit is whole just now."""
        with torch.no_grad():
            here = self._os_view()
            if self.master.data_ptr() != here.data_ptr():
                here.copy_(self.master)
            with self._progress(f"updating unit '{self.unit}' after a step"):
                self.ladder.climb(here, self.partition.os, self.shard, self.partition.p)
                if self.is_whole and self.partition.p is not N:
                    self.ladder.climb(self.shard, self.partition.p, self.whole, N)
        for slot in self.slots:  # as an in-place update would: a graph that saved the old values must not be used
            torch.autograd.graph.increment_version(slot.parameter)

    def collect(self) -> None:
        """While whole: take over what a user assigned to the ``data`` of a parameter."""
        with torch.no_grad():
            for slot, view in zip(self.slots, self._views, strict=True):
                if slot.parameter.data_ptr() != view.data_ptr():
                    view.copy_(slot.parameter)
        self.attach()

    def overwrite(self, whole: Tensor) -> None:
        """Make the shards those of ``whole``, the same flat values on every rank, in any floating dtype.

        A master keeps what ``whole`` only repeats in a narrower dtype.
        """
        with torch.no_grad():
            if self.master.data_ptr() != self._os_view().data_ptr():
                part = whole[self._os_slice]
                changed = part != self.master.to(whole.dtype)
                self.master.copy_(torch.where(changed, part.to(self.master.dtype), self.master))
            self.shard.copy_(whole[self._p_slice])
            if self.is_whole and self.partition.p is not N:
                self.whole.copy_(whole)

    def full_values(self) -> Tensor:
        """The whole values in the optimizer's dtype, as a new flat tensor; collective."""
        whole = torch.empty(self.numel, dtype=self.master.dtype, device=self.device)
        if self.master.data_ptr() != self._os_view().data_ptr():
            self.ladder.climb(self.master, self.partition.os, whole, N)
        else:
            self.ladder.climb(self.shard, self.partition.p, whole, N)
        return whole

    def expand(self, shard: Tensor) -> Tensor:
        """A flat tensor at rung os, of any dtype, gathered whole; collective."""
        whole = torch.empty(self.numel, dtype=shard.dtype, device=self.device)
        self.ladder.climb(shard.to(self.device), self.partition.os, whole, N)
        return whole

    def lend(self, device: str = "cpu", here: bool = True) -> None:
        """Let the module's parameters show their whole values in their own dtype on ``device``. Collective.

        Args:
            device: Where to; the host unless told.
            here: Whether this rank wants them; the others only take part.
        """
        whole = self.full_values()
        if here:
            self._put_aside = [slot.parameter.grad for slot in self.slots]
            whole = whole.to(device=device, dtype=self.own_dtype)
            for slot in self.slots:
                mark_whole(slot.parameter)
                slot.parameter.grad = None
                slot.parameter.data = self._view(whole, slot)

    def take_back(self) -> None:
        """End :meth:`lend`."""
        if self.is_whole:
            self.attach()
        else:
            self._haunt()
        for slot, gradient in zip(self.slots, self._put_aside, strict=True):  # the user may be in mid-accumulation
            slot.parameter.grad = gradient
        self._put_aside = []

    def forsake(self) -> None:
        """Free the device: what the optimizer needs moves to the host, the rest is dropped."""
        self._put_aside = []
        self.staging = self.accumulator = self.gradient = None
        for entry in self.entries:
            if entry is not None:
                entry.grad = None
        self._show_entries(self.master.cpu())
        empty = torch.empty(0, dtype=self.dtype)
        self.shard = self.whole = empty
        self._views = []

    def entry(self, index: int) -> nn.Parameter | None:
        """What the optimizer holds in place of a parameter: its slice of the os shard, or None if that is empty."""
        if self.entries[index] is None and not self.slots[index].is_empty:
            entry = nn.Parameter(self._os_part(self.master, index))
            entry._paro_parameter = weakref.ref(self.slots[index].parameter)  # type: ignore[attr-defined]
            self.entries[index] = entry
        return self.entries[index]

    def freeze(self, keep_master: bool) -> None:
        """Trained so far, frozen now: gradients are given back on all ranks, and the master unless it is kept."""
        self.clear(range(len(self.slots)))
        self.trainable = False
        if not keep_master:
            self._show_entries(self._os_view())

    def unfreeze(self) -> None:
        """Frozen so far, trained now: it has a master like the rest, on all ranks, even those it has no slice on."""
        self.trainable = True
        if self.has_master and self.master.dtype is not self.master_dtype:
            self._show_entries(self._os_view().to(self.master_dtype))

    def _show_entries(self, master: Tensor) -> None:
        self.master = master
        for index, entry in enumerate(self.entries):
            if entry is not None:
                entry.data = self._os_part(master, index)

    def _os_part(self, shard: Tensor, index: int) -> Tensor:
        slot = self.slots[index]
        part = shard[slot.shard]
        return part.view(slot.shape) if self.partition.os is N else part

    # ---- gradients ------------------------------------------------------------------------------------------

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
