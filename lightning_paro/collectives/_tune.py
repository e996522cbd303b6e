"""Chunk sizes by measurement: every operation at a few sizes, in a few chunk sizes, over the groups themselves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from lightning_paro.collectives._chunks import DEFAULT_CHUNK_BYTES, ChunkPlan
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._two_level import all_gather, all_reduce, broadcast, reduce_scatter

__all__ = ["slowest", "tune"]

MIB = 2**20
SIZES = (4 * MIB, 32 * MIB, 128 * MIB)
CHUNKS = (0, 1 * MIB, DEFAULT_CHUNK_BYTES, 16 * MIB, 64 * MIB)
WARMUP, REPEATS = 1, 3


def tune(
    groups: ProcessGroups,
    device: torch.device | str = "cpu",
    sizes: tuple[int, ...] = SIZES,
    chunks: tuple[int, ...] = CHUNKS,
) -> ChunkPlan:
    """Measure which ``chunk_bytes`` are the fastest. Collective.

    From then on the two-level collectives over these groups, on this kind of device, use them by default. That is done
    once: another call hands out the same plan. Nothing is ever measured unasked.

    The order of sums between three groups and more depends on the size of chunks. Where two runs have to have the same
    bits, give ``chunk_bytes`` or leave the default instead of measuring in each.

    Args:
        groups: The process groups.
        device: Where tensors live.
        sizes: Bytes of the whole tensors.
        chunks: The ``chunk_bytes`` to try.

    Returns:
        The plan, the same on all ranks.

    Raises:
        ValueError: If there is nothing to try, or a number of bytes makes no sense.
    """
    for name, given, least in (("sizes", sizes, 1), ("chunks", chunks, 0)):
        if not given or any(type(nbytes) is not int or nbytes < least for nbytes in given):
            raise ValueError(f"tune: {name}={given!r} must be one and more numbers of bytes, each at least {least}.")
    device = torch.device(device)
    key = ("chunks", device.type)
    if key not in groups.shared:
        groups.shared[key] = _measure(groups, device, sizes, chunks)
    plan: ChunkPlan = groups.shared[key]
    return plan


def _measure(groups: ProcessGroups, device: torch.device, sizes: tuple[int, ...], chunks: tuple[int, ...]) -> ChunkPlan:
    topology = groups.topology
    if 1 in (topology.group_size, topology.num_groups):  # one level, no chunks
        return ChunkPlan({})
    seconds: dict[str, dict[int, dict[int, float]]] = {}
    for size in sizes:
        whole = torch.zeros(-(-size // (4 * topology.world_size)) * topology.world_size, device=device)
        part = torch.zeros(whole.numel() // topology.world_size, device=device)
        operations: dict[str, Callable[..., object]] = {
            "all_gather": partial(all_gather, whole, part, groups),
            "reduce_scatter": partial(reduce_scatter, part, whole, groups),
            "all_reduce": partial(all_reduce, whole, groups),
            "broadcast": partial(broadcast, whole, 0, groups),
        }
        for name, operation in operations.items():
            tried = seconds.setdefault(name, {}).setdefault(whole.nbytes, {})
            for chunk in chunks:
                run = partial(operation, chunk_bytes=chunk)
                times = [slowest(groups, device, run) for _ in range(WARMUP + REPEATS)]
                tried[chunk] = statistics.median(times[WARMUP:])
    return ChunkPlan(seconds)


def slowest(groups: ProcessGroups, device: torch.device, run: Callable[[], object]) -> float:
    """Seconds that the slowest rank takes, the same number on all ranks. Collective.

    Args:
        groups: The process groups, of more than one rank.
        device: What to wait for, where it is an accelerator.
        run: What is timed.
    """
    dist.barrier(group=groups.control)
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=groups.control)
    return float(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
