"""All combinations on NCCL: two GPUs pose as hosts of two ranks, so that some links are NVLink and some are TCP.

NCCL decides by NCCL_HOSTID who shares a host; ranks of different "hosts" may share a GPU.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import free_port

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.t() * self.scale


def _loss(model: nn.Module, step: int, micro: int, rows: slice, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    x, y = torch.randint(0, 11, (2, 8, 5), generator=generator)
    return nn.functional.cross_entropy(model(x[rows].to(device)).flatten(0, 1), y[rows].to(device).flatten())


def _build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _one_process(accumulate: int) -> list[Tensor]:
    model = _build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            (_loss(model, step, micro, slice(0, 8), "cuda") / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def _join(rank: int, port: int, hosts: int) -> torch.device:
    """Become a rank of hosts of two ranks."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo",
        NCCL_HOSTID=f"host{rank // 2}",
    )  # fmt: skip
    device = torch.device("cuda", rank % 2)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl", rank=rank, world_size=2 * hosts, timeout=timedelta(seconds=120), device_id=device
    )
    return device


def _rank(rank: int, port: int, hosts: int) -> None:
    device, world = _join(rank, port, hosts), 2 * hosts
    from lightning_paro.collectives import ProcessGroups
    from lightning_paro.sharding import Engine
    from lightning_paro.topology import Partition, Topology

    groups = ProcessGroups.create(Topology(world, 2))
    for accumulate in (1, 3):
        expected = _one_process(accumulate)
        for partition in Partition.valid():
            model = _build()
            engine = Engine(model, partition, groups, device=device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            engine.attach(optimizer)
            mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
            for step in range(STEPS):
                optimizer.zero_grad()
                for micro in range(accumulate):
                    engine.step_begin()
                    loss = _loss(model, step, micro, mine, "cuda") / accumulate
                    engine.step_end(backward_follows=True)
                    engine.sync_gradients = micro == accumulate - 1
                    engine.backward_begin()
                    loss.backward()
                    engine.backward_end()
                scale = min(1.0, 0.5 / (engine.grad_norm().item() + 1e-6))
                for entry in engine.optimizers[0].entries():
                    if entry.grad is not None:
                        entry.grad.mul_(scale)
                optimizer.step()
            for whole in (True, False):
                engine.evaluation.begin(whole)
                with torch.inference_mode():  # as Lightning evaluates on NCCL
                    for _ in range(rank):
                        _loss(model, 0, 0, mine, "cuda")
                engine.evaluation.end()
            engine.close()
            for (name, value), truth in zip(model.named_parameters(), expected, strict=True):
                torch.testing.assert_close(
                    value.detach(), truth, rtol=0, atol=1e-10 * truth.abs().max().item(),
                    msg=lambda text, name=name, p=partition, s=accumulate: f"{p} s={s} {name}: {text}",
                )  # fmt: skip
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("hosts", [2, 4])
def test_all_combinations_equal_one_process_on_posed_hosts(hosts: int) -> None:
    torch.multiprocessing.spawn(_rank, (free_port(), hosts), nprocs=2 * hosts)


def _collectives(rank: int, port: int, hosts: int) -> None:
    device = _join(rank, port, hosts)
    from lightning_paro.collectives import ChunkPlan, ProcessGroups, all_gather, all_reduce, tune
    from lightning_paro.topology import Topology
    from tests.distributed.test_two_level import in_flight, wrong_results

    world = 2 * hosts
    for group_size in (1, 2, world) if hosts == 2 else (2,):  # four ranks a GPU: thousands of launches take minutes
        assert not wrong_results(group_size, str(device))
        for seed in range(3):
            assert not in_flight(group_size, seed, str(device))

    groups = ProcessGroups.create(Topology(world, 2))
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(2**20 + 1, generator=generator).to(device)
    for chunk_bytes in (0, 2**16):
        sums = [numbers.clone(), numbers.clone()]
        for tensor in sums:
            all_reduce(tensor, groups, chunk_bytes=chunk_bytes)
        assert torch.equal(*sums), "the same bits again"
        everywhere = torch.empty(world, numbers.numel(), device=device)
        all_gather(everywhere, sums[0], groups)
        assert all(torch.equal(row, sums[0]) for row in everywhere), "the same bits on all ranks"

    for _ in range(20):  # staging is used again and again, and given back while lanes are busy
        tensor = torch.full((2**22,), float(rank), device=device)
        all_reduce(tensor, groups, chunk_bytes=2**18)
        other = torch.full((2**22,), -1.0, device=device)
        assert tensor.min().item() == tensor.max().item() == world * (world - 1) / 2
        assert other.max().item() == -1.0

    before = torch.cuda.current_stream()
    plan = tune(groups, device, sizes=(2**22,), chunks=(0, 2**20))
    assert isinstance(plan, ChunkPlan)
    assert plan.seconds.keys() == {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
    assert torch.cuda.current_stream() == before
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("hosts", [2, 4])
def test_collectives_in_two_levels_on_posed_hosts(hosts: int) -> None:
    torch.multiprocessing.spawn(_collectives, (free_port(), hosts), nprocs=2 * hosts)
