"""One collective over all ranks, by both algorithms in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.lab.rank import Rank
from lightning_paro import collectives

__all__ = ["ALGORITHMS", "OPERATIONS", "measure", "tuned"]

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
ALGORITHMS = ("flat", "two-level")


def tuned(rank: Rank, nbytes: list[int]) -> dict[str, list[int]]:
    """Let chunk sizes be measured, which two levels use from here on: by operation, the best at each size."""
    plan = collectives.tune(rank.groups, rank.device, sizes=tuple(nbytes))
    return {operation: [plan.chunk_bytes(operation, size) for size in nbytes] for operation in OPERATIONS}


def measure(rank: Rank, operation: str, nbytes: int, warmup: int, measured: int) -> dict[str, Any]:
    """Time a collective whose whole tensor has ``nbytes``.

    Returns:
        ``seconds`` by algorithm, and whether the results of both are ``equal``: the addends are small whole numbers.
    """
    numel = nbytes // torch.bfloat16.itemsize // rank.topology.world_size * rank.topology.world_size
    seconds: dict[str, list[float]] = {algorithm: [] for algorithm in ALGORITHMS}
    results: dict[str, Tensor] = {}
    for turn in range(warmup + measured):
        for algorithm in ALGORITHMS:
            run, results[algorithm] = _prepare(rank, operation, numel, algorithm)
            rank.barrier()
            start = time.perf_counter()
            run()
            if rank.on_gpu:
                torch.cuda.synchronize()
            if turn >= warmup:
                seconds[algorithm].append(time.perf_counter() - start)
    equal = torch.equal(*results.values())
    del results
    rank.clean()
    return {"seconds": seconds, "equal": equal}


def _prepare(rank: Rank, operation: str, numel: int, algorithm: str) -> tuple[Callable[[], object], Tensor]:
    """The call, and the tensor that its result will be in."""
    call = getattr(collectives, operation)
    where: dict[str, Any] = {"dtype": torch.bfloat16, "device": rank.device}
    whole = torch.full((numel,), rank.rank + 1, **where)
    part = torch.full((numel // rank.topology.world_size,), rank.rank + 1, **where)
    if operation == "all_gather":
        return lambda: call(whole, part, rank.groups, algorithm=algorithm), whole
    if operation == "reduce_scatter":
        return lambda: call(part, whole, rank.groups, algorithm=algorithm), part
    if operation == "all_reduce":
        return lambda: call(whole, rank.groups, algorithm=algorithm), whole
    return lambda: call(whole, 0, rank.groups, algorithm=algorithm), whole
