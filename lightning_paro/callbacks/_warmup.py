"""Smaller steps for layers that were just activated: their fresh moments make the first ones large."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_paro.state_access import StateAccess

__all__ = ["Warmup"]


class Warmup:
    """Scales the first steps of a layer, which for torch's optimizers is the same as scaling its learning rate.

    Param groups stay as they are, so schedulers and checkpoints notice nothing. It takes one copy of those parameters
    while the optimizer steps, when activations are gone.

    Args:
        steps: How many of a layer's steps are scaled: the j-th by j / (steps + 1).
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._made: dict[tuple[int, int], int] = {}  # by layer and optimizer; those that are scaled count
        self._before: list[tuple[Tensor, Tensor, float]] = []
        self._numbers: dict[int, int] = {}  # of optimizers, by id
        self._handles: list[Any] = []

    def attach(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Watch the steps of some optimizers."""
        for number, optimizer in enumerate(optimizers if self._steps else ()):
            self._numbers[id(optimizer)] = number
            handle = optimizer.register_step_post_hook(self._scale)
            # ahead of hooks that hand the new values on
            optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            self._handles.append(handle)

    def detach(self) -> None:
        """Watch them no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._numbers, self._before = [], {}, []

    def stay(self, layers: Iterable[int]) -> None:
        """At a switch: all layers but these begin anew when they are trained again."""
        staying = set(layers)
        self._made = {key: made for key, made in self._made.items() if key[0] in staying}

    def begin(
        self, access: StateAccess, optimizer: torch.optim.Optimizer, layers: Mapping[int, Collection[str]]
    ) -> None:
        """Before a step of an optimizer, the next one of these layers, given by the names of their parameters.

        Collective.
        """
        if not self._steps:
            return
        number = self._numbers[id(optimizer)]
        factors: dict[str, float] = {}
        for layer, names in layers.items():
            made = self._made.get((layer, number), 0) + 1
            if made <= self._steps:
                self._made[layer, number] = made
                factors |= dict.fromkeys(names, made / (self._steps + 1))
        shards = access.trainable_shards() if factors else {}
        values = [(shard.value, factors[name]) for name, shard in shards.items() if name in factors]
        self._before = [(value, value.clone(), factor) for value, factor in values]

    def _scale(self, *_: object) -> None:
        before, self._before = self._before, []
        with torch.no_grad():
            for value, old, factor in before:
                value.copy_(torch.lerp(old, value, factor))

    def state_dict(self) -> dict[tuple[int, int], int]:
        """To be saved."""
        return dict(self._made)

    def load_state_dict(self, made: Mapping[tuple[int, int], int]) -> None:
        """What :meth:`state_dict` returned."""
        self._made = dict(made)
