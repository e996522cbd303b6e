"""All-gather, reduce-scatter, all-reduce and broadcast in two levels, in four processes that stand for two hosts.

    python examples/collectives.py

Shows that the results are those of torch's collectives over all ranks, and how many bytes leave a host in each; for
torch's that is what a ring in the order of ranks sends.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_paro import Topology
from lightning_paro.collectives import ProcessGroups, all_gather, all_reduce, broadcast, reduce_scatter

HOSTS, PER_HOST = 2, 2
WORLD_SIZE = HOSTS * PER_HOST
NUMEL = 2**20  # of the whole tensor


def run(name: str, rank: int, groups: ProcessGroups, algorithm: Any) -> Tensor:
    """One collective on numbers that differ from rank to rank; its result."""
    whole = torch.arange(NUMEL, dtype=torch.float64) * (rank + 1)
    part = whole[: NUMEL // WORLD_SIZE].clone()
    if name == "all_gather":
        all_gather(whole, part, groups, algorithm=algorithm)
        return whole
    if name == "reduce_scatter":
        reduce_scatter(part, whole, groups, algorithm=algorithm)
        return part
    if name == "all_reduce":
        task = all_reduce(whole, groups, algorithm=algorithm, async_op=True)
        task.wait()  # after something else
        return whole
    broadcast(whole, 1, groups, algorithm=algorithm)
    return whole


def work(rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    groups = ProcessGroups.create(Topology(WORLD_SIZE, group_size=PER_HOST))
    table = Table(f"a tensor of {8 * NUMEL / 1e6:.1f} MB", "equal", "MB out of a host: flat", "two-level")
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        results, leaving = [], []
        for algorithm in ("flat", "two-level"):
            groups.traffic.reset()
            results.append(run(name, rank, groups, algorithm))
            sent = torch.tensor([groups.traffic.inter])
            dist.all_reduce(sent)  # the sum over all ranks
            leaving.append(f"{sent.item() / HOSTS / 1e6:.1f}")
        equal = torch.tensor([torch.equal(*results)])
        dist.all_reduce(equal, op=dist.ReduceOp.MIN)
        table.add_row(name, "yes" if equal.item() else "NO", *leaving)
    if rank == 0:
        Console().print(table)
    dist.destroy_process_group()


def main() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port,), nprocs=WORLD_SIZE, start_method="fork")


if __name__ == "__main__":
    main()
