"""The two moves of the ladder: values climb by all-gathers, gradients descend by reduce-scatters.

Both work on flat buffers in the block order of :meth:`lightning_paro.topology.Topology.shard`, so each step is one
contiguous collective, and each byte between groups is an I-shard's, never a whole buffer's. Several buffers move
together: inside a group by one launch, where launches are what costs; between groups as one message, where small
messages are what costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_paro.collectives._lanes import Steps
from lightning_paro.collectives._legs import Legs, copy
from lightning_paro.topology import Granularity

__all__ = ["BUCKET_BYTES", "Ladder"]

BUCKET_BYTES = 128_000_000
"""What moves by one launch, whole. Of 25, 50 and 101 MB the largest was fastest (benchmarks/results/uneven.json)."""

N, I, G = Granularity  # noqa: E741


class Ladder(Legs):
    """Moves flat buffers between granularities over the process groups of a topology.

    Its methods are steps of a task, see :class:`~lightning_paro.collectives._lanes.Lanes`. Buffers that move together
    have one dtype.

    Args:
        groups: The process groups of this rank.
        device: Where tensors live.
        traffic: Where the bytes are counted.
    """

    def climb(self, shards: Sequence[Tensor], start: Granularity, outs: Sequence[Tensor], stop: Granularity) -> Steps:
        """Gather ``shards``, this rank's parts at ``start``, into ``outs``, its parts at the coarser ``stop``.

        A shard may be the very slice of its out that it fills.

        Args:
            shards: Flat tensors of ``numel / d(start)`` elements; cast on the way if they have another dtype.
            start: Granularity of ``shards``.
            outs: Flat tensors of ``numel / d(stop)`` elements, of the dtype that travels.
            stop: Granularity of ``outs``.
        """
        if start is stop:
            for shard, out in zip(shards, outs, strict=True):
                copy(out, shard)
            return
        if start is G:
            columns = outs if stop is I else [self._intra_part(out) for out in outs]
            yield "inter"
            yield from self._gather_between(columns, shards)
            shards = columns
        if stop is N:
            yield "intra_gather"
            shards = _cast(shards, outs[0].dtype)
            yield self.gather("intra_gather", outs, shards)

    def sum_inside(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
        """Sum ``wholes`` over the group; ``parts`` become this rank's parts at I.

        Args:
            wholes: Flat tensors, this rank's addends.
            parts: Flat tensors of ``numel / m`` elements, or ``wholes`` themselves in groups of one.
        """
        yield "intra_reduce"
        yield from self.scatter("intra_reduce", parts, wholes)

    def sum_between(self, parts: Sequence[Tensor], stop: Granularity, wire: torch.dtype, sums: list[Tensor]) -> Steps:
        """Sum ``parts``, at I, over the column, down to G or in place of a replica at I.

        Args:
            parts: Flat tensors of ``numel / m`` elements, the sums of this rank's group; may be overwritten.
            stop: I for the whole sums, G for this rank's part of them.
            wire: Dtype that travels.
            sums: Takes the results; they belong to the lane, so copy what is to stay.
        """
        yield "inter"
        ranks = self.groups.topology.num_groups
        if ranks == 1:
            sums += parts
            return
        if stop is I:
            sent = [part.to(wire) for part in parts]
            for part in sent:
                yield self.reduce("inter", part)
            sums += sent
            return
        if len(parts) == 1:
            message = parts[0].to(wire)
        else:  # one message, its rows the parts that go to one rank
            rows = [part.view(ranks, -1) for part in parts]
            message = rows[0].new_empty(ranks, sum(row.shape[1] for row in rows), dtype=wire)
            torch.cat(rows, dim=1, out=message)
        result = message.new_empty(message.numel() // ranks)
        yield from self.scatter("inter", [result], [message.view(-1)])
        sums += result.split([part.numel() // ranks for part in parts])

    def _gather_between(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Steps:
        if len(outs) == 1 or self.groups.inter is None:
            shards = _cast(shards, outs[0].dtype)
            yield self.gather("inter", outs, shards)
            return
        ranks = self.groups.topology.num_groups
        message = outs[0].new_empty(sum(shard.numel() for shard in shards))
        torch.cat(list(shards), out=message)
        received = message.new_empty(ranks, message.numel())
        yield self.gather("inter", [received.view(-1)], [message])
        rows = [out.view(ranks, -1) for out in outs]
        torch.split_with_sizes_copy(received, [row.shape[1] for row in rows], dim=1, out=rows)

    def _intra_part(self, whole: Tensor) -> Tensor:
        _, j = self.groups.topology.coordinates(self.groups.rank)
        length = whole.numel() // self.groups.topology.group_size
        return whole[j * length : (j + 1) * length]


def _cast(shards: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    if shards[0].dtype == dtype:
        return shards
    cast = [torch.empty_like(shard, dtype=dtype) for shard in shards]
    torch._foreach_copy_(cast, list(shards))
    return cast
