"""Smaller steps for layers that were just activated: their fresh moments make the first ones large."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_paro.state_access import StateAccess

__all__ = ["Warmup"]


class Warmup:
    """Scales the step of some parameters, which for torch's optimizers is the same as scaling their learning rate.

    Param groups stay as they are, so schedulers and checkpoints notice nothing. It takes one copy of those parameters
    while the optimizer steps, when activations are gone.

    Args:
        optimizers: The optimizers.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []
        self._factor = 1.0
        self._handles = []
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(self._scale)
            # ahead of hooks that hand the new values on
            optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            self._handles.append(handle)

    def begin(self, access: StateAccess, names: Collection[str], factor: float) -> None:
        """Before a step: these parameters are to go this part of their way. Collective."""
        self._factor = factor
        values = [shard.value for name, shard in access.trainable_shards().items() if name in names]
        self._before = [(value, value.clone()) for value in values]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _scale(self, *_: object) -> None:
        before, self._before = self._before, []
        with torch.no_grad():
            for value, old in before:
                value.copy_(torch.lerp(old, value, self._factor))
