"""Model state under FSDP: shards that the module's own parameters show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_paro.state_access._protocol import Shard
from lightning_paro.state_access._replicated import ReplicatedState

__all__ = ["FlatParameters", "ShardedTensors"]


class ShardedTensors(ReplicatedState):
    """FSDP2, ModelParallelStrategy: parameters are DTensors, and so are their gradients and optimizer state."""

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool = False) -> Iterator[None]:
        """As the protocol says; modules that were not wrapped are whole anyway."""
        wrapped: Sequence[FSDPModule] = [
            part for part in module.modules() if isinstance(part, FSDPModule)
        ] or self._around(module)
        for part in wrapped:
            part.unshard()
        try:
            yield
            written = {n: p.detach().clone() for n, p in module.named_parameters()} if writeback else {}
        finally:
            for part in wrapped:
                part.reshard()
        for name, parameter in module.named_parameters():
            if name in written:
                _write(parameter, written[name])

    def _around(self, module: nn.Module) -> Sequence[FSDPModule]:
        """The innermost wrapped module around a module that is not wrapped itself."""
        return [m for m in self._module.modules() if isinstance(m, FSDPModule) and module in set(m.modules())][-1:]

    def _shard(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> Shard:
        if not isinstance(parameter, DTensor):
            return super()._shard(parameter, state)
        mesh, placements = parameter.device_mesh, parameter.placements
        _, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        offset = 0
        for start, size in zip(offsets, parameter.shape, strict=True):
            offset = offset * size + start
        parts = 1
        for size, placement in zip(mesh.shape, placements, strict=True):
            parts *= size if placement.is_shard() else 1
        here = {key: _local(value) for key, value in state.items()}
        replicas = self._world_size // parts
        return Shard(_local(parameter.detach()), _local(parameter.grad), here, offset, parameter.shape, replicas)

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        for parameter in self._module.parameters():
            if isinstance(parameter, DTensor):
                for dim, placement in enumerate(parameter.placements):
                    if placement.is_shard():
                        torch.distributed.all_reduce(tensor, group=parameter.device_mesh.get_group(dim))
                break
        return tensor


class FlatParameters(ReplicatedState):
    """FSDP1 with ``use_orig_params``: parameters are views of their part of a flat shard, perhaps of nothing."""

    def __init__(self, strategy: FSDPStrategy) -> None:
        super().__init__(strategy)
        if not strategy.kwargs.get("use_orig_params", True):
            raise NotImplementedError(
                "FSDPStrategy(use_orig_params=False) merges parameters, so one cannot be frozen without its "
                "neighbours. HINT: leave use_orig_params out, or train with strategy='paro_ggg'."
            )

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool = False) -> Iterator[None]:
        if isinstance(self._strategy.model, FullyShardedDataParallel):
            self._strategy.model.check_is_root()  # or the first unit that is asked takes itself for the root
        with FullyShardedDataParallel.summon_full_params(module, writeback=writeback):
            yield

    def sizes(self) -> dict[str, int]:
        assert self._strategy.model is not None
        whole: dict[int, int] = {}
        for unit in FullyShardedDataParallel.fsdp_modules(self._strategy.model):
            if (flat := unit._flat_param) is not None:
                whole |= {id(p): shape.numel() for p, shape in zip(flat._params or (), flat._shapes, strict=True)}
        return {name: whole.get(id(p), p.numel()) for name, p in self._module.named_parameters()}

    def trainable_shards(self) -> Mapping[str, Shard]:
        raise NotImplementedError(
            "FSDPStrategy does not say which part of a parameter is here. HINT: train with strategy='paro_ggg', or "
            "with ModelParallelStrategy."
        )


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _write(parameter: nn.Parameter, whole: Tensor) -> None:
    """Rank 0's values, into what this rank holds of them."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            value = whole.full_tensor() if isinstance(whole, DTensor) else whole
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
        else:
            torch.distributed.broadcast(parameter.data, src=0)
