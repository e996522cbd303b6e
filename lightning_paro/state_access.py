"""How callbacks reach model state without asking which strategy holds it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_paro.sharding import Engine
from lightning_paro.strategies import ParoStrategy

__all__ = ["Shard", "StateAccess", "state_access"]


@dataclass(frozen=True)
class Shard:
    """This rank's part of one trainable parameter; the tensors are live.

    Changes to gradients and state count. After changes to values call :meth:`StateAccess.update_parameters`.

    Attributes:
        value: Master values, flat where they are partitioned.
        grad: Gradient of ``value``, None outside of boundary and step or where no rank used the parameter.
        state: The optimizer's own state of ``value``.
        offset: Which element of the flattened parameter ``value`` starts with.
        full_shape: Shape of the whole parameter.
        replicas: On how many ranks this very part lies.
    """

    value: Tensor
    grad: Tensor | None
    state: Mapping[str, Any]
    offset: int
    full_shape: torch.Size
    replicas: int


class StateAccess(Protocol):
    """What :func:`state_access` returns. Every method is collective: call it on every rank."""

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        """Whole parameter values of ``module`` on every rank; with ``writeback`` rank 0's changes are kept."""

    def set_trainable(self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False) -> None:
        """Freeze or unfreeze parameters; what is frozen gives its gradients and optimizer state back."""

    def trainable_shards(self) -> Mapping[str, Shard]:
        """This rank's part of every trainable parameter that an optimizer holds, by name; empty parts left out."""

    def update_parameters(self) -> None:
        """Let parameters have what was written to the values of shards, as after a step of an optimizer."""

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        """Sum a value over the ranks whose parts make up one copy of the model, in place."""


def state_access(trainer: Trainer) -> StateAccess:
    """Access to the model state of a running Trainer.

    Raises:
        NotImplementedError: If the strategy has no adapter yet.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParoStrategy):
        return _Sharded(strategy.engine)
    if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return _Replicated(trainer.lightning_module, strategy.optimizers, trainer.world_size)
    raise NotImplementedError(
        f"state_access does not know {type(strategy).__name__}; expected ParoStrategy, DDPStrategy or "
        "SingleDeviceStrategy. HINT: train with strategy='paro_ggg' where you would use FSDP."
    )


def _parameters(what: nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(what.parameters() if isinstance(what, nn.Module) else what)


class _Sharded:
    """ParoStrategy."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return self._engine.full_parameters(module, writeback)

    def set_trainable(self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False) -> None:
        self._engine.set_trainable(_parameters(what), flag, keep_master)

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


class _Replicated:
    """A single device, or DDP: every rank has everything."""

    def __init__(self, module: LightningModule, optimizers: list[torch.optim.Optimizer], world_size: int) -> None:
        self._module = module
        self._optimizers = optimizers
        self._world_size = world_size

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool = False) -> Iterator[None]:
        before = None if writeback else [p.detach().clone() for p in module.parameters()]
        try:
            yield
        finally:
            for value, parameter in zip(before or (), module.parameters(), strict=False):
                parameter.data.copy_(value)
        if writeback and self._world_size > 1:
            for parameter in module.parameters():
                torch.distributed.broadcast(parameter.data, src=0)

    def set_trainable(self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False) -> None:
        for parameter in _parameters(what):
            parameter.requires_grad_(flag)
            if not flag:
                parameter.grad = None
                for optimizer in self._optimizers:
                    optimizer.state.pop(parameter, None)

    def trainable_shards(self) -> Mapping[str, Shard]:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return {
            names[p]: Shard(p.detach(), p.grad, optimizer.state.get(p, {}), 0, p.shape, self._world_size)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def update_parameters(self) -> None:
        """The values of shards are the parameters."""

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        return tensor
