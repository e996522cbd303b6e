"""Model state that lies with the module's own parameters: on a single device, and under DDP on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_paro.state_access._protocol import Shard, parameters_of

__all__ = ["ReplicatedState", "no_longer_postponed", "postpone_ddp"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module in which DDP looks for names that it is to leave out."""


class ReplicatedState:
    """A single device, or DDP: every rank has everything."""

    def __init__(self, strategy: Strategy) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._world_size = self._module.trainer.world_size

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

    def sizes(self) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in self._module.named_parameters()}

    def set_trainable(
        self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False, keep_state: bool = False
    ) -> None:
        parameters = parameters_of(what)
        for parameter in parameters:
            parameter.requires_grad_(flag)
            if not flag:
                parameter.grad = None
        if not (flag or keep_state):
            self.drop_state(parameters)
        if isinstance(self._strategy, DDPStrategy):
            rebuild_ddp(self._strategy)

    def optimizer_state(self, what: nn.Module | Iterable[nn.Parameter]) -> dict[str, dict[str, Any]]:
        wanted = {id(parameter) for parameter in parameters_of(what)}
        names = {id(p): name for name, p in self._module.named_parameters()}
        states = [_states(optimizer) for optimizer in self._strategy.optimizers]
        return {names[id(p)]: state[p] for state in states for p in state if id(p) in wanted}

    def drop_state(self, what: nn.Module | Iterable[nn.Parameter]) -> None:
        for parameter in parameters_of(what):
            for optimizer in self._strategy.optimizers:
                _states(optimizer).pop(parameter, None)

    def trainable_shards(self) -> Mapping[str, Shard]:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        return {
            names[p]: self._shard(p, _states(optimizer).get(p, {}))
            for optimizer in self._strategy.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _shard(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> Shard:
        return Shard(parameter.detach(), parameter.grad, state, 0, parameter.shape, self._world_size)

    def update_parameters(self) -> None:
        """The values of shards are the parameters."""

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        return tensor


def _states(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """Where an optimizer keeps its state; ZeroRedundancyOptimizer has another one inside, for this rank's part."""
    inner = getattr(optimizer, "optim", optimizer)
    return inner.state


def postpone_ddp(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Before DDP is set up: leave parameters out until :func:`rebuild_ddp`, or it makes buckets for all of them."""
    no_longer_postponed(module)  # by a run that failed before it began
    chosen = {id(parameter) for parameter in parameters}
    ignored = getattr(module, _IGNORED, ())
    names = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    if any(id(p) not in chosen for p in names.values()):  # DDP takes no module without parameters
        postponed = [name for name, p in names.items() if id(p) in chosen]
        vars(module)["_paro_postponed"] = postponed
        vars(module)[_IGNORED] = [*ignored, *postponed]


def no_longer_postponed(module: nn.Module) -> list[str]:
    """End :func:`postpone_ddp`; returns the names of what was left out."""
    names: list[str] = vars(module).pop("_paro_postponed", [])
    if names:
        vars(module)[_IGNORED] = [name for name in getattr(module, _IGNORED) if name not in names]
    return names


def rebuild_ddp(strategy: DDPStrategy) -> None:
    """Wrap the module anew: DDP makes buckets for what is trainable when it is built, and reduces nothing else.

    Values are not broadcast again, they are the same on all ranks; those of what was postponed are, once. Between steps
    only.
    """
    old = strategy.model
    module = old.module if isinstance(old, DistributedDataParallel) else strategy.lightning_module
    assert module is not None
    strategy.model = module  # should anything fail from here on
    if isinstance(old, DistributedDataParallel):
        vars(old).pop("reducer", None)  # it takes its hooks off the parameters when it goes
        vars(old).pop("logger", None)
    for name in no_longer_postponed(module):
        torch.distributed.broadcast(module.get_parameter(name).data, src=0)
    if any(parameter.requires_grad for parameter in module.parameters()):
        options = {**strategy._ddp_kwargs, "init_sync": False}
        device_ids = strategy.determine_ddp_device_ids()
        strategy.model = DistributedDataParallel(module, device_ids=device_ids, **options)
        strategy._register_ddp_hooks()
