"""Copies of a sharded module are ordinary modules: nothing they do reaches the shards."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_paro import Partition, Topology
from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding import Engine
from tests.distributed.pool import WORLD_SIZE, Pool


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).double()


def _input() -> Tensor:
    return torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8)


def _pickled(module: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(module))
    return twin


def _outputs_of_a_copy(partition: str, copied: Callable[[nn.Module], nn.Module]) -> tuple[list[Tensor], int]:
    """A copy's outputs while the original is sharded, on rank 0 only, and after that; and the bytes it made move."""
    engine = Engine(_model(), Partition.parse(partition), ProcessGroups.create(Topology(WORLD_SIZE, 2)))
    with engine.full_parameters():
        twin = copied(engine.module)
    before = engine.traffic.intra + engine.traffic.inter
    outputs = []
    if engine.groups.rank == 0:
        outputs.append(twin(_input()))
        outputs[0].sum().backward()
    moved = engine.traffic.intra + engine.traffic.inter - before
    engine.close()
    del engine
    gc.collect()
    outputs.append(twin(_input()))
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in twin.parameters())
    return [output.detach() for output in outputs], moved


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("partition", ["nng", "iig", "ggg"])
def test_a_copy_made_under_full_parameters_computes_alone(
    pool: Pool, partition: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    expected = _model()(_input()).detach()
    for outputs, moved in pool.run(_outputs_of_a_copy, partition, copied):
        assert moved == 0
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=1e-12, atol=0)
