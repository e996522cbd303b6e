"""Evaluation with ranks out of step: any number of forwards, of any units, in any order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.pool import WORLD_SIZE, Pool


def _net() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(11, 7), "blocks": nn.ModuleList(nn.Linear(7, 7) for _ in range(3))})


def _evaluate(partitions: tuple[str, ...], group_size: int, whole: bool) -> list[str]:
    from lightning_paro.collectives import ProcessGroups
    from lightning_paro.sharding import Engine
    from lightning_paro.topology import Granularity, Partition, Topology

    rank, wrong = torch.distributed.get_rank(), []
    for name in partitions:
        net, truth = _net(), _net()
        engine = Engine(net, Partition.parse(name), ProcessGroups.create(Topology(WORLD_SIZE, group_size)))
        for loop in range(2):
            engine.evaluation.begin(whole)
            with torch.no_grad():
                for k in range(3 * ((rank + loop) % WORLD_SIZE)):  # one rank has nothing to do
                    index, tokens = (rank + k) % 3, torch.tensor([k % 11])
                    here = net["blocks"][index](net["embed"](tokens))
                    if not torch.equal(here, truth["blocks"][index](truth["embed"](tokens))):
                        wrong.append(f"{name}: forward {k} of loop {loop}")
                    partitioned = engine.partition.p is not Granularity.N
                    blocks_whole = [unit.is_whole for unit in engine.units if unit.name != "rest"]
                    if partitioned and any(blocks_whole) is not whole:
                        wrong.append(f"{name}: blocks whole after use: {blocks_whole}")
            engine.evaluation.end()
        if engine.partition.p is not Granularity.N and any(unit.is_whole for unit in engine.units):
            wrong.append(f"{name}: whole after the loop")
        engine.close()
    return wrong


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "joint"])
def test_ranks_may_run_different_numbers_of_forwards(
    pool: Pool, some: tuple[str, ...], group_size: int, whole: bool
) -> None:
    assert pool.run(_evaluate, some, group_size, whole) == [[]] * WORLD_SIZE
