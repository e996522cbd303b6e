"""The strategies that callbacks are tested under on four ranks, and the whole values that they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_paro import ParoStrategy

__all__ = ["FullyShards", "strategy_of", "whole_values"]


class FullyShards:
    """Shards a module's ``layers``, and then itself, with FSDP2."""

    layers: Any
    device_mesh: Any

    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[arg-type]


def strategy_of(name: str, sharded: Callable[[], LightningModule]) -> dict[str, Any]:
    """Arguments for a training: the strategy, and under FSDP2 what builds the module, in float32."""
    if name == "ddp":
        return {"strategy": DDPStrategy(process_group_backend="gloo")}
    if name == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
        return {"strategy": strategy, "build": sharded, "precision": "32-true"}
    return {"strategy": ParoStrategy(name, group_size=2)}


def whole_values(module: LightningModule) -> dict[str, Tensor]:
    """The trained values, after the strategy was torn down."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }
