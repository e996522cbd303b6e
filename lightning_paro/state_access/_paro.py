"""Model state under ParoStrategy: what the engine holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_paro.sharding import Engine
from lightning_paro.state_access._protocol import Shard, parameters_of

__all__ = ["PartitionedState"]


class PartitionedState:
    """ParoStrategy: every rank has its shards."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return self._engine.full_parameters(module, writeback)

    def sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self._engine.module.named_parameters()}

    def set_trainable(
        self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False, keep_state: bool = False
    ) -> None:
        self._engine.set_trainable(parameters_of(what), flag, keep_master, keep_state)

    def optimizer_state(self, what: nn.Module | Iterable[nn.Parameter]) -> dict[str, dict[str, Any]]:
        return {
            name: optimizer.state[entry]
            for optimizer, name, entry in self._entries(what)
            if dict.__contains__(optimizer.state, entry)
        }

    def drop_state(self, what: nn.Module | Iterable[nn.Parameter]) -> None:
        for optimizer, _, entry in self._entries(what):
            optimizer.state.pop(entry, None)

    def trainable_shards(self) -> Mapping[str, Shard]:
        topology = self._engine.topology
        replicas = topology.world_size // topology.divisor(self._engine.partition.os)
        shards = {}
        self._engine.settle()  # what is handed out may be written to
        for attached in self._engine.optimizers:
            for flat, index in attached.members():
                slot, entry = flat.slots[index], flat.entry(index)
                if entry is not None and slot.parameter.requires_grad:
                    state = attached.optimizer.state.get(entry, {})
                    shards[slot.name] = Shard(entry.detach(), entry.grad, state, slot.offset, slot.shape, replicas)
        return shards

    def update_parameters(self) -> None:
        self._engine.discard_ahead()
        flats = [flat for attached in self._engine.optimizers for flat in attached.flats() if flat.trainable]
        self._engine.update({flat: flat.indices for flat in flats})

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        return self._engine.sum_over_shards(tensor)

    def _entries(
        self, what: nn.Module | Iterable[nn.Parameter]
    ) -> Iterator[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
        """What optimizers hold in place of parameters, on this rank."""
        wanted = {id(parameter) for parameter in parameters_of(what)}
        for attached in self._engine.optimizers:
            for flat, index in attached.members():
                slot, entry = flat.slots[index], flat.entry(index)
                if entry is not None and id(slot.parameter) in wanted:
                    yield attached.optimizer, slot.name, entry
