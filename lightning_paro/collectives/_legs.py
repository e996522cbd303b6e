"""One leg: a collective in one group of this rank, launched in its lane and counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paro.collectives import _compat
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._lanes import Lanes, Steps
from lightning_paro.collectives._traffic import Traffic

__all__ = ["Legs", "copy"]


class Legs:
    """The collectives that everything else is made of, by role.

    Each hands out what is to be waited for, unless it is None; a reduce-scatter is steps of a task. In a group of one
    rank they copy.

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
        self.lanes = Lanes.over(groups, torch.device(device))

    def gather(self, role: str, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> object:
        """All-gather every shard into its out, by one launch."""
        group = self._group(role, outs)
        if group is None:
            for out, shard in zip(outs, shards, strict=True):
                copy(out, shard)
            return None
        if len(outs) == 1:
            return _compat.all_gather(outs[0], shards[0], group=group, async_op=self.lanes.is_async)
        return _compat.gather_all(list(outs), list(shards), group=group, async_op=self.lanes.is_async)

    def scatter(self, role: str, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Steps:
        """Reduce-scatter, summing, every whole into its part."""
        group = self._group(role, wholes)
        if group is None:
            for part, whole in zip(parts, wholes, strict=True):
                copy(part, whole)
        elif self.lanes.is_async and role != "world":  # gloo's own sends the whole sum to all: here only addends travel
            received = [torch.empty_like(whole) for whole in wholes]
            yield from [_compat.all_to_all(r, w, group=group) for r, w in zip(received, wholes, strict=True)]
            for part, addends in zip(parts, received, strict=True):
                torch.sum(addends.view(self.groups.role_size(role), -1), 0, out=part)
        elif len(wholes) == 1:
            yield _compat.reduce_scatter(parts[0], wholes[0], group=group, async_op=self.lanes.is_async)
        else:
            _compat.scatter_all(list(parts), list(wholes), group=group)

    def reduce(self, role: str, tensor: Tensor) -> object:
        """All-reduce, summing, in place."""
        group = self._group(role, [tensor], passes=2)
        return None if group is None else dist.all_reduce(tensor, group=group, async_op=self.lanes.is_async)

    def broadcast(self, role: str, tensor: Tensor, src: int) -> object:
        """Broadcast in place from the rank ``src`` of the world, which is in the group."""
        group = self._group(role, [tensor])
        return None if group is None else _compat.broadcast(tensor, src, group=group, async_op=self.lanes.is_async)

    def _group(self, role: str, wholes: Sequence[Tensor], passes: int = 1) -> dist.ProcessGroup | None:
        """The group of a role, with what it is about to send counted."""
        group: dist.ProcessGroup | None = getattr(self.groups, role)
        if group is None:
            return None
        k = self.groups.role_size(role)
        nbytes = passes * sum(whole.nbytes for whole in wholes) * (k - 1) // k
        self.traffic.calls += 1
        if role == "inter" or (role == "world" and self.groups.sends_out):
            self.traffic.inter += nbytes
        else:
            self.traffic.intra += nbytes
        return group


def copy(out: Tensor, shard: Tensor) -> None:
    """Copy, unless it is the same memory."""
    if out.data_ptr() != shard.data_ptr():
        out.copy_(shard)
