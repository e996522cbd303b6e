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


def _rank(rank: int, port: int, hosts: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo",
        NCCL_HOSTID=f"host{rank // 2}",
    )  # fmt: skip
    from lightning_paro.collectives import ProcessGroups
    from lightning_paro.sharding import Engine
    from lightning_paro.topology import Partition, Topology

    device = torch.device("cuda", rank % 2)
    torch.cuda.set_device(device)
    world = 2 * hosts
    torch.distributed.init_process_group(
        "nccl", rank=rank, world_size=world, timeout=timedelta(seconds=120), device_id=device
    )
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
