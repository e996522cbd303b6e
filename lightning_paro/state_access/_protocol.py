"""What a callback may ask of model state, whoever holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Shard", "StateAccess", "parameters_of"]


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
    """What :func:`state_access` returns. Methods are collective unless they say otherwise: call them on every rank."""

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        """Whole parameter values of ``module`` on every rank; with ``writeback`` rank 0's changes are kept."""

    def sizes(self) -> dict[str, int]:
        """Elements of every parameter, by name; where one is split, of the whole. Not collective."""

    def set_trainable(
        self, what: nn.Module | Iterable[nn.Parameter], flag: bool, keep_master: bool = False, keep_state: bool = False
    ) -> None:
        """Freeze or unfreeze parameters; what is frozen gives its gradients and optimizer state back.

        Args:
            what: A module, for all of its parameters, or parameters.
            flag: Whether they are trained.
            keep_master: Keep master weights of what is frozen, where they are not the parameters themselves.
            keep_state: Let the optimizer keep its state of what is frozen.
        """

    def optimizer_state(self, what: nn.Module | Iterable[nn.Parameter]) -> dict[str, dict[str, Any]]:
        """This rank's optimizer state of parameters, by name, of frozen ones as well; live. Not collective."""

    def drop_state(self, what: nn.Module | Iterable[nn.Parameter]) -> None:
        """Let the optimizer forget its state of parameters. Not collective."""

    def trainable_shards(self) -> Mapping[str, Shard]:
        """This rank's part of every trainable parameter that an optimizer holds, by name; empty parts left out."""

    def update_parameters(self) -> None:
        """Let parameters have what was written to the values of shards, as after a step of an optimizer."""

    def reduce_over_shards(self, tensor: Tensor) -> Tensor:
        """Sum a value over the ranks whose parts make up one copy of the model, in place."""


def parameters_of(what: nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a caller meant."""
    return list(what.parameters() if isinstance(what, nn.Module) else what)
