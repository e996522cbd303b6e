"""The flat collectives: torch 2.13 renamed ``*_tensor`` to ``*_single`` and warns about the old ones.

Complex numbers travel as pairs of real ones, and what is only moved, in a dtype that no backend takes, as bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

__all__ = ["MOVABLE", "all_gather", "all_to_all", "broadcast", "gather_all", "plain", "reduce_scatter", "scatter_all"]

MOVABLE = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""Dtypes that gloo and NCCL know."""

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The shards of all ranks of the group, one after another."""
    return _all_gather(plain(out), plain(shard), group=group, async_op=async_op)


def reduce_scatter(out: Tensor, whole: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The k-th part of the sum goes to the k-th rank of the group."""
    return _reduce_scatter(plain(out), plain(whole), group=group, async_op=async_op)


def broadcast(tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
    """The flat tensor of rank ``src`` of the world, in place."""
    return dist.broadcast(plain(tensor), src, group=group, async_op=async_op)


def gather_all(outs: list[Tensor], shards: list[Tensor], group: Any, async_op: bool) -> Any:
    """All-gathers of several tensors, on an accelerator by one launch.

    Gloo does them one by one: with coalesced ones of real and of complex numbers under way together, torch 2.13
    corrupts the heap. That was seen; what else may set it off was not found out.
    """
    if async_op:
        return _Works([all_gather(*pair, group=group, async_op=True) for pair in zip(outs, shards, strict=True)])
    options = AllgatherOptions()
    options.asyncOp = False
    name = "all_gather_single_coalesced"
    launch = getattr(group, name, None) or group.allgather_into_tensor_coalesced
    _done(launch([plain(out) for out in outs], [plain(shard) for shard in shards], options))
    return None


def scatter_all(outs: list[Tensor], wholes: list[Tensor], group: Any) -> None:
    """Reduce-scatters, summing, of several tensors by one launch."""
    options = ReduceScatterOptions()
    options.asyncOp = False
    name = "reduce_scatter_single_coalesced"
    launch = getattr(group, name, None) or group.reduce_scatter_tensor_coalesced
    _done(launch([plain(out) for out in outs], [plain(whole) for whole in wholes], options))


def all_to_all(out: Tensor, whole: Tensor, group: Any) -> Any:
    """The k-th part of ``whole`` goes to the k-th rank of the group."""
    return dist.all_to_all_single(out, whole, group=group, async_op=True)


def plain(tensor: Tensor) -> Tensor:
    """The same elements of a flat tensor, as something that gloo and NCCL take."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    return tensor if tensor.dtype in MOVABLE else tensor.view(torch.uint8)


class _Works:
    """Several of a ``Work``."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _done(work: Any) -> None:
    if work is not None:
        work.wait()
