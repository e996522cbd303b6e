"""The two moves of the ladder: values climb by all-gathers, gradients descend by reduce-scatters.

Both work on flat buffers in the block order of :meth:`lightning_paro.topology.Topology.shard`, so each step is one
contiguous collective, and each byte between groups is an I-shard's, never a whole buffer's. Several buffers move
together: inside a group by one launch, where launches are what costs; between groups as one message, where small
messages are what costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paro.collectives import _compat
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._lanes import Lanes, Steps
from lightning_paro.topology import Granularity

__all__ = ["BUCKET_BYTES", "Ladder", "Traffic"]

BUCKET_BYTES = 128_000_000
"""What moves by one launch, whole. Smaller launches cost more time than they save memory, on what we have measured."""

N, I, G = Granularity  # noqa: E741


@dataclass
class Traffic:
    """Bytes that this rank sent in collectives: a gather or scatter of T bytes over k ranks sends ``T * (k-1) / k``."""

    intra: int = 0
    inter: int = 0
    control: int = 0
    calls: int = 0

    def reset(self) -> None:
        """Start counting from zero."""
        self.intra = self.inter = self.control = self.calls = 0


class Ladder:
    """Moves flat buffers between granularities over the process groups of a topology.

    Its methods are steps of a task, see :class:`~lightning_paro.collectives._lanes.Lanes`. Buffers that move together
    have one dtype.

    Args:
        groups: The process groups of this rank.
        device: Where tensors live.
        traffic: Where the bytes are counted.
    """

    def __init__(
        self, groups: ProcessGroups, device: torch.device | str = "cpu", traffic: Traffic | None = None
    ) -> None:
        self.groups = groups
        self.traffic = Traffic() if traffic is None else traffic
        self.lanes = Lanes(groups, torch.device(device))

    def climb(self, shards: Sequence[Tensor], start: Granularity, outs: Sequence[Tensor], stop: Granularity) -> Steps:
        """Gather ``shards``, this rank's parts at ``start``, into ``outs``, its parts at the coarser ``stop``.

        A shard may be the very slice of its out that it fills.

        Args:
            shards: Flat tensors of ``numel / d(start)`` elements.
            start: Granularity of ``shards``.
            outs: Flat tensors of ``numel / d(stop)`` elements, of the same dtype.
            stop: Granularity of ``outs``.
        """
        if start is stop:
            for shard, out in zip(shards, outs, strict=True):
                _copy(out, shard)
            return
        if start is G:
            columns = outs if stop is I else [self._intra_part(out) for out in outs]
            yield "inter"
            yield from self._gather_between(columns, shards)
            shards = columns
        if stop is N:
            yield "intra_gather"
            yield self._gather("intra_gather", outs, shards)

    def sum_inside(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
        """Sum ``wholes`` over the group; ``parts`` become this rank's parts at I.

        Args:
            wholes: Flat tensors, this rank's addends.
            parts: Flat tensors of ``numel / m`` elements, or ``wholes`` themselves in groups of one.
        """
        yield "intra_reduce"
        yield from self._scatter("intra_reduce", parts, wholes)

    def sum_between(self, parts: Sequence[Tensor], stop: Granularity, wire: torch.dtype, sums: list[Tensor]) -> Steps:
        """Sum ``parts``, at I, over the column, down to G or in place of a replica at I.

        Args:
            parts: Flat tensors of ``numel / m`` elements, the sums of this rank's group; may be overwritten.
            stop: I for the whole sums, G for this rank's part of them.
            wire: Dtype that travels.
            sums: Takes the results; they belong to the lane, so copy what is to stay.
        """
        yield "inter"
        group, ranks = self.groups.inter, self.groups.topology.num_groups
        if group is None:
            sums += parts
            return
        if stop is I:
            sent = [part.to(wire) for part in parts]
            for part in sent:
                self._count("inter", [part], passes=2)
                yield dist.all_reduce(part, group=group, async_op=self.lanes.is_async)
            sums += sent
            return
        if len(parts) == 1:
            message = parts[0].to(wire)
        else:  # one message, its rows the parts that go to one rank
            rows = [part.view(ranks, -1) for part in parts]
            message = rows[0].new_empty(ranks, sum(row.shape[1] for row in rows), dtype=wire)
            torch.cat(rows, dim=1, out=message)
        result = message.new_empty(message.numel() // ranks)
        yield from self._scatter("inter", [result], [message.view(-1)])
        sums += result.split([part.numel() // ranks for part in parts])

    def _gather_between(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Steps:
        if len(outs) == 1 or self.groups.inter is None:
            yield self._gather("inter", outs, shards)
            return
        ranks = self.groups.topology.num_groups
        message = torch.cat(list(shards))
        received = message.new_empty(ranks, message.numel())
        yield self._gather("inter", [received.view(-1)], [message])
        rows = [out.view(ranks, -1) for out in outs]
        torch.split_with_sizes_copy(received, [row.shape[1] for row in rows], dim=1, out=rows)

    def _gather(self, role: str, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> object:
        """All-gathers of several tensors; what they hand out is to be waited for, unless it is None."""
        group = getattr(self.groups, role)
        if group is None:
            for out, shard in zip(outs, shards, strict=True):
                _copy(out, shard)
            return None
        self._count(role, outs)
        if len(outs) == 1:
            return _compat.all_gather(outs[0], shards[0], group=group, async_op=self.lanes.is_async)
        return _compat.gather_all(list(outs), list(shards), group=group, async_op=self.lanes.is_async)

    def _scatter(self, role: str, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Steps:
        """Reduce-scatters of several tensors."""
        group = getattr(self.groups, role)
        if group is None:
            return
        self._count(role, wholes)
        if self.lanes.is_async:  # gloo's own sends the whole sum to everybody: here only addends travel
            received = [torch.empty_like(whole) for whole in wholes]
            yield from [_compat.all_to_all(r, w, group=group) for r, w in zip(received, wholes, strict=True)]
            for part, addends in zip(parts, received, strict=True):
                torch.sum(addends.view(self.groups.role_size(role), -1), 0, out=part)
        elif len(wholes) == 1:
            _compat.reduce_scatter(parts[0], wholes[0], group=group)
        else:
            _compat.scatter_all(list(parts), list(wholes), group=group)

    def _intra_part(self, whole: Tensor) -> Tensor:
        _, j = self.groups.topology.coordinates(self.groups.rank)
        length = whole.numel() // self.groups.topology.group_size
        return whole[j * length : (j + 1) * length]

    def _count(self, role: str, wholes: Sequence[Tensor], passes: int = 1) -> None:
        k = self.groups.role_size(role)
        self.traffic.calls += 1
        nbytes = passes * sum(whole.nbytes for whole in wholes) * (k - 1) // k
        if role == "inter":
            self.traffic.inter += nbytes
        else:
            self.traffic.intra += nbytes


def _copy(out: Tensor, shard: Tensor) -> None:
    if out.data_ptr() != shard.data_ptr():
        out.copy_(shard)
