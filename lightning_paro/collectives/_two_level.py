"""PaRO-CC: collectives over all ranks in two levels, between groups and inside them (PaRO, "PaRO-CC").

Data lie as in torch's collectives over the world, in the order of ranks: ``i * m + j`` for member j of group i. Between
groups, a tensor of D bytes crosses as D/m bytes in each of the m columns, so ``D * (ng-1) / ng`` in all leave a group
where a flat ring sends ``D * (n-1) / n`` out of it, in ng-1 slow hops instead of n-1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_paro.collectives import _stages
from lightning_paro.collectives._checks import (
    check_call,
    check_multiple,
    check_same_call,
    check_src,
    check_summable,
    refused_together,
)
from lightning_paro.collectives._chunks import DEFAULT_CHUNK_BYTES, ChunkPlan
from lightning_paro.collectives._compat import plain
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._lanes import Steps, Task
from lightning_paro.collectives._legs import Legs
from lightning_paro.collectives._pipeline import Pipeline
from lightning_paro.collectives._stages import Chunks, once

__all__ = ["Algorithm", "all_gather", "all_reduce", "broadcast", "reduce_scatter"]

Algorithm: TypeAlias = Literal["two-level", "flat"]


def all_gather(
    out: Tensor,
    shard: Tensor,
    groups: ProcessGroups,
    *,
    algorithm: Algorithm = "two-level",
    async_op: bool = False,
    chunk_bytes: int | None = None,
) -> Task | None:
    """Gather the shards of all ranks, in the order of ranks: between groups first, then inside.

    Args:
        out: Contiguous, of ``n * shard.numel()`` elements; block r becomes the shard of rank r.
        shard: Contiguous, of any dtype, of one size on all ranks. It may be the very block of ``out`` that it fills.
        groups: The process groups.
        algorithm: ``"flat"`` for torch's own collective over all ranks.
        async_op: Whether to return at once.
        chunk_bytes: Bytes of what is gathered between groups at a time, beside the chunk before it that is gathered
            inside; 0 for all at once. None for what :func:`tune` measured, or ``DEFAULT_CHUNK_BYTES`` if nobody has.

    Returns:
        With ``async_op`` a task: ``wait()`` before the tensors are used or freed. Ranks may wait in any order.

    Raises:
        ValueError: If sizes, dtypes, devices or strides do not fit, before anything is sent.
    """
    with refused_together(groups):
        check_call("all_gather", groups, algorithm, chunk_bytes, {"out": out, "shard": shard})
        check_multiple("all_gather", groups.topology.world_size, ("out", out), ("shard", shard))
    whole, part = _elements(out), _elements(shard)
    return _run(
        "all_gather", groups, (out, shard), algorithm, async_op, chunk_bytes,
        one_level=("intra_gather", lambda legs, role: once(legs.gather, role, [whole], [part])),
        two_levels=lambda legs, size: _stages.gather(legs, whole, part, size),
    )  # fmt: skip


def reduce_scatter(
    out: Tensor,
    whole: Tensor,
    groups: ProcessGroups,
    *,
    algorithm: Algorithm = "two-level",
    async_op: bool = False,
    chunk_bytes: int | None = None,
) -> Task | None:
    """Sum the tensors of all ranks and leave block r of the sums on rank r: inside groups first, then between.

    The order of the sums depends on topology, sizes and ``chunk_bytes`` alone: the bits are the same on every run.

    Args:
        out: Contiguous, of ``whole.numel() / n`` elements. It may be the very block of ``whole`` that it sums.
        whole: Contiguous, of a dtype that can be summed; what is not ``out`` stays as it is.
        groups: The process groups.
        algorithm: ``"flat"`` for torch's own collective over all ranks.
        async_op: Whether to return at once.
        chunk_bytes: As for :func:`all_gather`.

    Returns:
        As :func:`all_gather`.

    Raises:
        ValueError: As :func:`all_gather`, and if elements of this dtype cannot be summed.
    """
    with refused_together(groups):
        check_call("reduce_scatter", groups, algorithm, chunk_bytes, {"out": out, "whole": whole})
        check_multiple("reduce_scatter", groups.topology.world_size, ("whole", whole), ("out", out))
        check_summable("reduce_scatter", whole)
    source, part = _elements(whole), _elements(out)
    return _run(
        "reduce_scatter", groups, (whole, out), algorithm, async_op, chunk_bytes,
        one_level=("intra_reduce", lambda legs, role: legs.scatter(role, [part], [source])),
        two_levels=lambda legs, size: _stages.scatter(legs, part, source, size),
    )  # fmt: skip


def all_reduce(
    tensor: Tensor,
    groups: ProcessGroups,
    *,
    algorithm: Algorithm = "two-level",
    async_op: bool = False,
    chunk_bytes: int | None = None,
) -> Task | None:
    """Sum the tensors of all ranks in place: reduce-scatter inside, all-reduce between, all-gather inside groups.

    The bits are the same on all ranks, and on every run with one topology, size and ``chunk_bytes``.

    Args:
        tensor: Contiguous, of any length, of a dtype that can be summed.
        groups: The process groups.
        algorithm: ``"flat"`` for torch's own collective over all ranks.
        async_op: Whether to return at once.
        chunk_bytes: As for :func:`all_gather`.

    Returns:
        As :func:`all_gather`.

    Raises:
        ValueError: As :func:`reduce_scatter`.
    """
    with refused_together(groups):
        check_call("all_reduce", groups, algorithm, chunk_bytes, {"tensor": tensor})
        check_summable("all_reduce", tensor)
    flat = _elements(tensor)
    return _run(
        "all_reduce", groups, (tensor,), algorithm, async_op, chunk_bytes,
        one_level=("intra_reduce", lambda legs, role: once(legs.reduce, role, flat)),
        two_levels=lambda legs, size: _stages.reduce(legs, flat, size),
    )  # fmt: skip


def broadcast(
    tensor: Tensor,
    src: int,
    groups: ProcessGroups,
    *,
    algorithm: Algorithm = "two-level",
    async_op: bool = False,
    chunk_bytes: int | None = None,
) -> Task | None:
    """Copy the tensor of rank ``src`` to all: along the column of ``src``, then inside every group.

    Args:
        tensor: Contiguous, of any dtype, of one size on all ranks.
        src: Rank in the world, the same on all ranks.
        groups: The process groups.
        algorithm: ``"flat"`` for torch's own collective over all ranks.
        async_op: Whether to return at once.
        chunk_bytes: As for :func:`all_gather`.

    Returns:
        As :func:`all_gather`.

    Raises:
        ValueError: As :func:`all_gather`, and if there is no such rank.
    """
    with refused_together(groups):
        check_call("broadcast", groups, algorithm, chunk_bytes, {"tensor": tensor})
        check_src("broadcast", groups.topology.world_size, src)
    flat = _elements(tensor)
    return _run(
        "broadcast", groups, (tensor,), algorithm, async_op, chunk_bytes,
        one_level=("intra_gather", lambda legs, role: once(legs.broadcast, role, flat, src)),
        two_levels=lambda legs, size: _stages.spread(legs, flat, src, size), src=src,
    )  # fmt: skip


def _run(
    what: str,
    groups: ProcessGroups,
    tensors: tuple[Tensor, ...],
    algorithm: Algorithm,
    async_op: bool,
    chunk_bytes: int | None,
    one_level: tuple[str, Callable[[Legs, str], Steps]],
    two_levels: Callable[[Legs, int], Chunks],
    **options: object,
) -> Task | None:
    """Run a collective on ``tensors``, the whole one first, in as many levels as there are."""
    device, nbytes = tensors[0].device, tensors[0].nbytes
    if chunk_bytes is None:
        chunk_bytes = _chunk_bytes(what, groups, device, nbytes)
    options |= {"algorithm": algorithm, "chunk_bytes": chunk_bytes}
    options |= {"groups": groups.topology.groups or groups.topology.group_size}
    check_same_call(what, groups, tensors[0], options)
    legs = Legs(groups, device, groups.traffic)
    role, collective = one_level
    if algorithm == "flat":
        role = "world"
    elif groups.topology.group_size == 1:
        role = "inter"
    if nbytes == 0:
        chunks, staging = Chunks([[(role, iter(()))]])
    elif algorithm == "flat" or 1 in (groups.topology.group_size, groups.topology.num_groups):
        chunks, staging = Chunks([[(role, collective(legs, role))]])
    else:
        chunks, staging = two_levels(legs, chunk_bytes)
    key = ("pipeline", device)
    pipeline: Pipeline = groups.shared.setdefault(key, Pipeline(legs.lanes))
    task = pipeline.start(f"{what} of {nbytes} bytes", chunks, _stages.SLOTS, (*tensors, *staging))
    if async_op:
        return task
    task.wait()
    return None


def _chunk_bytes(what: str, groups: ProcessGroups, device: torch.device, nbytes: int) -> int:
    """What was measured, or the default."""
    plan: ChunkPlan | None = groups.shared.get(("chunks", device.type))
    return DEFAULT_CHUNK_BYTES if plan is None else plan.chunk_bytes(what, nbytes)


def _elements(tensor: Tensor) -> Tensor:
    """In a row, as something that gloo and NCCL take."""
    return plain(tensor.detach().view(-1))
