"""A gather inside a host: a collective, or copies out of the peers' memory without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.lab.rank import Rank

__all__ = ["WAYS", "measure"]

WAYS = ("collective", "copies")
_GATHERS, _WIDTH, _PRODUCTS = 8, 4096, 6
_DEVICE_ARGUMENT = 6  # of what rebuilds a tensor of another process: on which device its memory is opened


def measure(rank: Rank, nbytes: int, pieces: int, measured: int) -> dict[str, Any]:
    """Time both ways to gather ``pieces`` tensors of ``nbytes`` each over the ranks of this host.

    Copies need no rendezvous here: nobody writes to a shard meanwhile. An engine would need one before and after every
    change of the shards.

    Returns:
        Median ``seconds`` of one gather ``alone``, and of eight, each ``beside`` a computation; of the ``computation``
        alone; and whether the results are ``equal``.
    """
    group, size = rank.groups.intra_gather, rank.topology.group_size
    numel = nbytes // 2 // size
    shards = [torch.full((numel,), rank.rank + 1, dtype=torch.bfloat16, device=rank.device) for _ in range(pieces)]
    parts = [*zip(*_opened(rank, shards), strict=True)]
    wholes = {
        way: [torch.empty(numel * size, dtype=torch.bfloat16, device=rank.device) for _ in shards] for way in WAYS
    }

    def collective() -> None:
        with dist._coalescing_manager(group, rank.device):
            for whole, shard in zip(wholes["collective"], shards, strict=True):
                dist.all_gather_into_tensor(whole, shard, group)

    def copies() -> None:
        for whole, row in zip(wholes["copies"], parts, strict=True):
            for piece, shard in zip(whole.split(numel), row, strict=True):
                piece.copy_(shard)

    runs = {"collective": collective, "copies": copies}
    square = torch.randn(_WIDTH, _WIDTH, device=rank.device, dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def computing(gather: Callable[[], None] | None) -> Callable[[], None]:
        def run() -> None:
            here = torch.cuda.current_stream()
            for _ in range(_GATHERS):
                if gather is not None:
                    side.wait_stream(here)
                    with torch.cuda.stream(side):
                        gather()
                product = square
                for _ in range(_PRODUCTS):
                    product = product @ square * 0.01
                here.wait_stream(side)

        return run

    def median(run: Callable[[], None]) -> float:
        seconds = []
        for _ in range(2 + measured):
            rank.barrier()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[2:])

    result = {
        "alone": {way: median(run) for way, run in runs.items()},
        "beside": {way: median(computing(run)) for way, run in runs.items()},
        "computation": median(computing(None)),
        "equal": all(torch.equal(a, b) for a, b in zip(*wholes.values(), strict=True)),
    }
    rank.barrier()  # nobody frees what another may still read
    return result


def _opened(rank: Rank, shards: list[Tensor]) -> list[list[Tensor]]:
    """The shards of all ranks of this host, by their place in it; those of others are their own memory."""
    mine = [reduce_tensor(shard) for shard in shards]
    found: list[Any] = [None] * rank.topology.world_size
    dist.all_gather_object(found, mine, group=rank.groups.control)
    opened = []
    for peer in rank.topology.intra_ranks(rank.topology.coordinates(rank.rank)[0]):
        if peer == rank.rank:
            opened.append(shards)
            continue
        rebuilt = []
        for rebuild, arguments in found[peer]:
            arguments = list(arguments)
            arguments[_DEVICE_ARGUMENT] = rank.device.index
            rebuilt.append(rebuild(*arguments))
        opened.append(rebuilt)
    return opened
