"""The flat collectives: torch 2.13 renamed ``*_tensor`` to ``*_single`` and warns about the old ones.

Complex numbers travel as pairs of real ones, which is all that backends take.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

__all__ = ["all_gather", "all_to_all", "gather_all", "reduce_scatter", "scatter_all"]

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The shards of all ranks of the group, one after another."""
    return _all_gather(*_real([out, shard]), group=group, async_op=async_op)


def reduce_scatter(out: Tensor, whole: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The k-th part of the sum goes to the k-th rank of the group."""
    return _reduce_scatter(*_real([out, whole]), group=group, async_op=async_op)


def gather_all(outs: list[Tensor], shards: list[Tensor], group: Any, async_op: bool) -> Any:
    """All-gathers of several tensors by one launch."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    name = "all_gather_single_coalesced"
    launch = getattr(group, name, None) or group.allgather_into_tensor_coalesced
    return _work(launch(_real(outs), _real(shards), options), async_op)


def scatter_all(outs: list[Tensor], wholes: list[Tensor], group: Any) -> None:
    """Reduce-scatters, summing, of several tensors by one launch."""
    options = ReduceScatterOptions()
    options.asyncOp = False
    name = "reduce_scatter_single_coalesced"
    launch = getattr(group, name, None) or group.reduce_scatter_tensor_coalesced
    _work(launch(_real(outs), _real(wholes), options), async_op=False)


def all_to_all(out: Tensor, whole: Tensor, group: Any) -> Any:
    """The k-th part of ``whole`` goes to the k-th rank of the group."""
    return dist.all_to_all_single(out, whole, group=group, async_op=True)


def _real(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor for tensor in tensors]


def _work(work: Any, async_op: bool) -> Any:
    if async_op or work is None:
        return work
    work.wait()
    return None
