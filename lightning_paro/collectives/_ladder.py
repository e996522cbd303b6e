"""The two moves of the ladder: values climb by all-gathers, gradients descend by reduce-scatters.

Both work on flat buffers in the block order of :meth:`lightning_paro.topology.Topology.shard`, so each step is one
contiguous collective with no copy in or out, and each byte between groups is an I-shard's, never a whole buffer's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paro.collectives import _compat
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.topology import Granularity

__all__ = ["Ladder", "Traffic"]

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


@dataclass(frozen=True)
class Ladder:
    """Moves flat buffers between granularities over the process groups of a topology.

    Args:
        groups: The process groups of this rank.
        traffic: Where the bytes are counted.
    """

    groups: ProcessGroups
    traffic: Traffic = field(default_factory=Traffic)

    def climb(self, shard: Tensor, start: Granularity, out: Tensor, stop: Granularity) -> None:
        """Gather ``shard``, this rank's part at ``start``, into ``out``, this rank's part at the coarser ``stop``.

        ``shard`` may be the very slice of ``out`` that it fills.

        Args:
            shard: Flat tensor of ``numel / d(start)`` elements.
            start: Granularity of ``shard``.
            out: Flat tensor of ``numel / d(stop)`` elements, of the same dtype.
            stop: Granularity of ``out``.
        """
        if start is stop:
            if shard.data_ptr() != out.data_ptr():
                out.copy_(shard)
            return
        if start is G:
            column = out if stop is I else out[self._intra_slice(out)]
            self._all_gather("inter", column, shard)
            shard = column
        if stop is N:
            self._all_gather("intra_gather", out, shard)

    def descend(
        self,
        partial: Tensor,
        start: Granularity,
        stop: Granularity,
        *,
        sync: bool,
        intra_dtype: torch.dtype | None = None,
        inter_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Sum ``partial``, this rank's addend at ``start``, down to this rank's part at the finer ``stop``.

        Args:
            partial: Flat tensor of ``numel / d(start)`` elements; overwritten. At N it holds this rank's own addend, at
                I the sum of its group, at G the sum of all ranks.
            start: Granularity of ``partial``.
            stop: Granularity of the result.
            sync: Whether the result must be the sum over *all* ranks. Without it a result at N stays this rank's own,
                and a result at I is the sum of its group only.
            intra_dtype: Wire dtype inside a group; None keeps the dtype of ``partial``.
            inter_dtype: Wire dtype between groups; None keeps the dtype of ``partial``.

        Returns:
            A flat tensor of ``numel / d(stop)`` elements, in the dtype of the last leg.
        """
        if start is G or (start is stop and not sync):
            return partial
        whole = partial
        if start is N:
            whole = partial = self._cast("intra_reduce", partial, intra_dtype)
            partial = self._reduce_scatter("intra_reduce", partial)
        if stop is G:
            return self._reduce_scatter("inter", self._cast("inter", partial, inter_dtype))
        if sync:
            partial = self._cast("inter", partial, inter_dtype)
            self._all_reduce("inter", partial)
        if stop is N:
            self._all_gather("intra_gather", whole, partial.to(whole.dtype))
            return whole
        return partial

    def _intra_slice(self, whole: Tensor) -> slice:
        _, j = self.groups.topology.coordinates(self.groups.rank)
        length = whole.numel() // self.groups.topology.group_size
        return slice(j * length, (j + 1) * length)

    def _cast(self, role: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Into the wire dtype, if anything will go over the wire."""
        return tensor if dtype is None or getattr(self.groups, role) is None else tensor.to(dtype)

    def _all_gather(self, role: str, out: Tensor, shard: Tensor) -> None:
        group = getattr(self.groups, role)
        if group is None:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return
        self._count(role, out.nbytes)
        _compat.all_gather(out, shard, group=group)

    def _reduce_scatter(self, role: str, whole: Tensor) -> Tensor:
        group = getattr(self.groups, role)
        if group is None:
            return whole
        self._count(role, whole.nbytes)
        shard = whole.new_empty(whole.numel() // self.groups.role_size(role))
        _compat.reduce_scatter(shard, whole, group=group)
        return shard

    def _all_reduce(self, role: str, whole: Tensor) -> None:
        group = getattr(self.groups, role)
        if group is None:
            return
        self._count(role, 2 * whole.nbytes)
        dist.all_reduce(whole, group=group)

    def _count(self, role: str, nbytes: int) -> None:
        k = self.groups.role_size(role)
        self.traffic.calls += 1
        if role == "inter":
            self.traffic.inter += nbytes * (k - 1) // k
        else:
            self.traffic.intra += nbytes * (k - 1) // k
