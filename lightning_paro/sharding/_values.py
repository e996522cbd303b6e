"""The values of one flat buffer: where its parameters lie, their shard at rung p, the master weights at rung os."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_paro.collectives import Ladder, Task, after
from lightning_paro.collectives._compat import broadcast
from lightning_paro.sharding._policy import PrecisionPolicy
from lightning_paro.sharding._shown import Shown
from lightning_paro.sharding._slot import Slot
from lightning_paro.topology import Granularity, Partition

__all__ = ["FlatValues", "Written", "gather_all", "names_of", "parameter_of", "take_over_all"]

N, I, G = Granularity  # noqa: E741

_ALIGNMENT = 8  # elements: every parameter of a 2-byte buffer starts at a multiple of 16 bytes


class Written(Enum):
    """What becomes of what the module's code writes to whole values that were gathered."""

    COUNTS = "by each rank's slices"
    RANK_ZERO = "as rank 0 wrote it"
    LOST = "lost"


class FlatValues:
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
        self.device = device
        self.own_dtype = parameters[0][1].dtype
        self.dtype = policy.compute_dtype(self.own_dtype)
        self.master_dtype = policy.master_dtype(self.own_dtype)
        self.trainable = parameters[0][1].requires_grad
        topology, rank = ladder.groups.topology, ladder.groups.rank

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
        self.shown = Shown([name for name, _ in parameters], [parameter for _, parameter in parameters], unit)

        self.arrival: Task | None = None  # of the whole values
        self.update: Task | None = None  # of the shard's new values after a step
        self.written = Written.COUNTS
        self._kept: Tensor | None = None  # this rank's part at rung os while whole values (p=N) are on loan
        self.is_mixed = False
        self.entries: list[nn.Parameter | None] = [None] * len(self.slots)
        self._load(parameters)

    def _slot(self, name: str, parameter: nn.Parameter, start: int) -> Slot:
        stop = start + parameter.numel()
        low, high = self._os_slice.start, self._os_slice.stop
        first, last = max(start, low), min(stop, high)
        shard = slice(first - low, last - low) if first < last else slice(0, 0)
        return Slot(name, parameter, start, parameter.numel(), parameter.shape, shard, max(first - start, 0))

    def _load(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        """Build the shards from rank 0's values, one flat buffer at a time."""
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.zeros(self.numel, dtype=self.own_dtype, device=self.device)
            if self.ladder.groups.rank == 0:
                for slot in self.slots:
                    self._view(whole, slot).copy_(slot.parameter)
            if self.ladder.groups.topology.world_size > 1:
                broadcast(whole, src=0)
            is_p_whole = self.partition.p is N
            self.shard = whole[self._p_slice].to(self.dtype, copy=not is_p_whole)
            self.master = self.os_view()
            if self.trainable and self.has_master:
                self._take_master(whole[self._os_slice].clone())
            if is_p_whole:
                self.whole = self.shard
            else:
                self.whole = torch.empty(self.numel, dtype=self.dtype, device=self.device)
                self._storage_bytes = self.whole.untyped_storage().nbytes()
                self.shown.prepare_release(self.dtype, self.device)
            self.shown.views = [self._view(self.whole, slot) for slot in self.slots]
        self.is_whole = True
        self.attach()
        if not is_p_whole:
            self.release()

    @property
    def indices(self) -> range:
        """The numbers of all slots."""
        return range(len(self.slots))

    @property
    def has_master(self) -> bool:
        """Whether the optimizer's values, where there are any, are wider than what computes."""
        return self.master_dtype != self.dtype

    @property
    def is_mastered(self) -> bool:
        """Whether there are such values, rather than a view of the parameter shard."""
        return self.master.dtype != self.dtype

    @property
    def is_cast(self) -> bool:
        """Whether the master is the shard at rung p as well, cast when it is gathered: there both are cut alike."""
        return self.shard is self.master

    def _take_master(self, master: Tensor) -> None:
        self._show_entries(master)
        if self.partition.p is self.partition.os is not N:
            self.shard = master

    def _view(self, whole: Tensor, slot: Slot) -> Tensor:
        return whole[slot.start : slot.start + slot.numel].view(slot.shape)

    def os_view(self) -> Tensor:
        """This rank's part at rung os of the parameter shard; not the master."""
        offset = self._os_slice.start - self._p_slice.start
        return self.shard[offset : offset + self._os_slice.stop - self._os_slice.start]

    def attach(self) -> None:
        """Let the module's parameters show the whole values."""
        self.shown.values()
        self.shown.note_versions()

    @property
    def nbytes_whole(self) -> int:
        """Bytes of the whole values."""
        return self.numel * self.dtype.itemsize

    def arrive_whole(self) -> None:
        """Use the whole values from here on, which a task brings."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
            self.is_whole = True
            self.attach()

    def gather(self, again: bool = False) -> None:
        """Climb from rung p to N, here and now.

        Args:
            again: Even if the whole values are there, because other ranks need this one to take part.
        """
        if self.is_whole and not again:
            return
        if self.arrival is None:
            gather_all([self])
        self.arrive_whole()

    def settle(self) -> None:
        """Use the shard's new values from here on."""
        if self.update is not None:
            self.update.wait()
            self._is_settled()

    def cancel_update(self) -> None:
        """The end of a run that others may have left: do not wait for what they may never send.

        What is cut off leaves a mixture of old and new values at rung p. It is shown to nobody; those at rung os, which
        :meth:`full_values` then reads, are whole.
        """
        if self.update is not None:
            self.update.cancel()
            self.is_mixed = self.update.is_cut
            self._is_settled()
            if self.is_mixed and self.partition.p is N:
                self.shown.prepare_release(self.dtype, self.device)
                self.shown.nothing()

    def _is_settled(self) -> None:
        self.update = None
        if self.partition.p is N:
            self.shown.settled()

    def settle_when_asked(self) -> None:
        """Let whole parameters (p=N) wait for their new values as soon as somebody looks at one of them."""
        self.shown.pending(_weakly(self))

    def release(self) -> None:
        """Give the whole values back; the parameters become ghosts that keep shape, dtype and identity."""
        if self.partition.p is N:
            return
        if self.arrival is not None:  # it was not needed after all
            self.discard_arrival()
        elif self.is_whole:
            self.take_over()
            self.is_whole = False
            self.shown.nothing()
            self._free()

    def discard_arrival(self) -> None:
        """Do not use the whole values that are under way."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
            self._free()

    def cancel_arrival(self) -> None:
        """After an interruption: do not wait for what other ranks may never send."""
        if self.arrival is not None:
            self.arrival.cancel()
            self.arrival = None
            if not self.is_whole:
                self._free()
        elif not self.is_whole and self.whole.untyped_storage().nbytes():
            self._renew()  # a gather that was interrupted in its launch may still write to the memory
            self._free()

    def _free(self) -> None:
        if not self.whole.untyped_storage().resizable():  # somebody has seen a view of it as a numpy array
            self._renew()
        self.whole.untyped_storage().resize_(0)

    def _renew(self) -> None:
        """Leave the memory of the whole values to whoever else uses it."""
        with torch.inference_mode(False):
            self.whole = torch.empty_like(self.whole)
            self.shown.views = [self._view(self.whole, slot) for slot in self.slots]

    def is_shown_by(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of the whole values; one that torch.func has wrapped might be."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return True
        if tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.whole.untyped_storage().data_ptr()

    def have_moved(self, indices: Iterable[int]) -> None:
        """After a step: tell autograd, as an in-place update would; a graph that saved their old values is void."""
        for index in indices:
            torch.autograd.graph.increment_version(self.slots[index].parameter)
        self.shown.note_versions()

    def take_over(self) -> None:
        """Keep what the module's code wrote to its parameters in place, or assigned to their ``data``.

        On all ranks alike: this rank's slices of it count, or where :class:`Written` says so rank 0's, which is
        collective. Inside of a context that loses what is written in it, nothing is kept.
        """
        if self.written is Written.LOST:
            return
        is_rank_zeros = self.written is Written.RANK_ZERO
        if self.partition.p is not N and not is_rank_zeros and not (self.is_whole and self.shown.is_written()):
            return
        self.settle()
        self.collect()
        if is_rank_zeros and self.ladder.groups.topology.world_size > 1:
            broadcast(self.whole, src=0)
        with torch.inference_mode(False), torch.no_grad():
            self._rewrite(self.whole)

    def collect(self) -> None:
        """While whole: bring what a user assigned to the ``data`` of a parameter back into the flat buffer."""
        with torch.inference_mode(False), torch.no_grad():
            self.shown.collect()

    def loan(self) -> None:
        """From here on to :meth:`give_back`, what is written to the whole values is lost."""
        self.written = Written.LOST
        if self.partition.p is N and not self.is_mastered:
            with torch.inference_mode(False):
                self._kept = self.os_view().clone()

    def is_changed(self) -> bool:
        """Whether somebody wrote to whole values on loan, as far as this rank can see it."""
        if self.shown.is_written():
            return True
        if self.partition.p is not N:  # in-place writes through data leave no other trace
            return not torch.equal(self.whole[self._p_slice], self.shard.to(self.dtype))
        return not torch.equal(self.os_view(), self.master.to(self.dtype) if self._kept is None else self._kept)

    def give_back(self) -> None:
        """End :meth:`loan`: what this rank has of the values is as it was, of whole ones (p=N) its part at rung os."""
        self.attach()  # what was assigned to their data is dropped
        if self.partition.p is N:
            with torch.inference_mode(False), torch.no_grad():
                self.os_view().copy_(self.master if self._kept is None else self._kept)
        self._kept = None

    def drop_written(self) -> None:
        """Lose what was written without talking to other ranks, except where whole values are split at rung os."""
        if self.partition.p is not N:
            self.written = Written.LOST
            if self.is_whole and self.is_changed():
                self.have_moved(self.indices)  # no graph may go on with these values
                self.release()
        elif self.partition.os is N:
            self.give_back()
        self._kept = None

    def overwrite(self, whole: Tensor) -> None:
        """Make the shards those of ``whole``, the same flat values on every rank, in any floating dtype.

        A master keeps what ``whole`` only repeats in a narrower dtype.
        """
        self.settle()
        with torch.no_grad():
            self._rewrite(whole)
            if self.is_whole and self.partition.p is not N:
                self.whole.copy_(whole)

    def _rewrite(self, whole: Tensor) -> None:
        if self.is_mastered:
            part = whole[self._os_slice]
            changed = part != self.master.to(part.dtype)
            self.master.copy_(torch.where(changed, part, self.master))
        if not self.is_cast and whole is not self.shard:
            self.shard.copy_(whole[self._p_slice])

    def full_values(self) -> Tensor:
        """The whole values in the optimizer's dtype, as a new flat tensor; collective."""
        if self.is_mixed or self._kept is not None:
            return self._gathered(self.master if self._kept is None else self._kept, self.partition.os)
        self.take_over()
        if self.is_mastered:
            return self._gathered(self.master, self.partition.os)
        self.settle()
        return self._gathered(self.shard, self.partition.p)

    def expand(self, shard: Tensor) -> Tensor:
        """A flat tensor at rung os, of any dtype, gathered whole; collective."""
        return self._gathered(shard.to(self.device), self.partition.os)

    def _gathered(self, shard: Tensor, start: Granularity) -> Tensor:
        whole = torch.empty(self.numel, dtype=shard.dtype, device=self.device)
        self.ladder.lanes.start(self.ladder.climb([shard], start, [whole], N), f"reading unit '{self.unit}'").wait()
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
            self.shown.others(self._view(whole, slot) for slot in self.slots)

    def take_back(self) -> None:
        """End :meth:`lend`."""
        if not self.is_whole:
            self.shown.nothing()
        elif self.written is Written.LOST:
            self.shown.values()  # what was written up to now is still to be lost
        else:
            self.attach()
        for slot, gradient in zip(self.slots, self._put_aside, strict=True):  # the user may be in mid-accumulation
            slot.parameter.grad = gradient
        self._put_aside = []

    def take_in(self) -> None:
        """End :meth:`lend` on all ranks, with the values that the parameters have by now."""
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.zeros(self.numel, dtype=self.own_dtype, device=self.device)
            for slot in self.slots:
                self._view(whole, slot).copy_(slot.parameter)
        self.take_back()
        self.overwrite(whole)

    def forsake(self) -> None:
        """Free the device: what the optimizer needs moves to the host, the rest is dropped."""
        self._put_aside = []
        self._show_entries(self.master.cpu())
        empty = torch.empty(0, dtype=self.dtype)
        self.shard = self.whole = empty
        self.shown.views = []

    def entry(self, index: int) -> nn.Parameter | None:
        """What the optimizer holds in place of a parameter: its slice of the os shard, or None if that is empty."""
        if self.entries[index] is None and not self.slots[index].is_empty:
            part = self._os_part(self.master, index)
            entry = nn.Parameter(part, requires_grad=part.is_floating_point() or part.is_complex())
            entry._paro_parameter = weakref.ref(self.slots[index].parameter)  # type: ignore[attr-defined]
            self.entries[index] = entry
        return self.entries[index]

    def freeze(self, keep_master: bool) -> None:
        """Trained so far, frozen now: the master is given back on all ranks, unless it is kept."""
        self.settle()
        self.trainable = False
        if not keep_master:
            if self.is_cast:
                self.shard = self.master.to(self.dtype)
            self._show_entries(self.os_view())

    def unfreeze(self) -> None:
        """Frozen so far, trained now: it has a master like the rest, on all ranks, even those it has no slice on."""
        self.trainable = True
        if self.has_master and not self.is_mastered:
            self.settle()
            self._take_master(self.os_view().to(self.master_dtype))

    def _show_entries(self, master: Tensor) -> None:
        self.master = master
        for index, entry in enumerate(self.entries):
            if entry is not None:
                entry.data = self._os_part(master, index)

    def _os_part(self, shard: Tensor, index: int) -> Tensor:
        slot = self.slots[index]
        part = shard[slot.shard]
        return part.view(slot.shape) if self.partition.os is N else part


def gather_all(flats: Sequence[FlatValues]) -> None:
    """Start to gather the whole values of flats of one dtype, by one launch, after the updates of their shards.

    They arrive in the same storage every time, so views that autograd saved stay valid.
    """
    first = flats[0]
    with torch.inference_mode(False), torch.no_grad():
        for flat in flats:
            if not flat.is_whole:
                flat.whole.untyped_storage().resize_(flat._storage_bytes)
        updates = [flat.update for flat in flats if flat.update is not None]
        shards, wholes = [flat.shard for flat in flats], [flat.whole for flat in flats]
        climb = first.ladder.climb(shards, first.partition.p, wholes, N)
        task = first.ladder.lanes.start(after(updates, climb), f"gathering {names_of(flats)}")
    for flat in flats:
        flat.arrival = task


def take_over_all(flats: Sequence[FlatValues]) -> None:
    """:meth:`FlatValues.take_over` of several flats, whose parameters may have been given each other's memory."""
    with torch.inference_mode(False), torch.no_grad():
        for flat in flats:
            flat.settle()
            if flat.is_whole and flat.written is not Written.LOST:
                flat.shown.unalias()
    for flat in flats:
        flat.take_over()


def parameter_of(entry: Tensor) -> nn.Parameter | None:
    """The module's parameter that an optimizer's entry stands for; None of what is no entry."""
    reference: Callable[[], nn.Parameter | None] = getattr(entry, "_paro_parameter", lambda: None)
    return reference()


def names_of(flats: Sequence[FlatValues]) -> str:
    """The units of neighbouring flats, for messages."""
    names = list(dict.fromkeys(flat.unit for flat in flats))
    return f"unit '{names[0]}'" if len(names) == 1 else f"units '{names[0]}' to '{names[-1]}'"


def _weakly(flat: FlatValues) -> Callable[[], None]:
    """What settles a flat, for its parameters' classes: owning it they would be a cycle."""
    reference = weakref.ref(flat)

    def settle() -> None:
        here = reference()
        if here is not None:
            here.settle()

    return settle
