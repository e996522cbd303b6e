"""Parts of Lightning that look into an optimizer's param groups meet the module's parameters there, not the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning

from lightning_paro.sharding import Engine

__all__ = ["show_parameters"]


def show_parameters(
    engine: Engine, module: LightningModule, callbacks: Iterable[Callback]
) -> list[Callable[[], object]]:
    """Wrap the toggles of manual optimization, and callbacks that freeze layers and train them later.

    Args:
        engine: The engine, with its optimizers attached.
        module: Toggling an optimizer means the ``requires_grad`` of what its param groups hold.
        callbacks: BaseFinetuning compares parameters by value, and knows param groups by the names of theirs.

    Returns:
        What undoes the wrapping.
    """
    wrapped: list[tuple[object, str, bool]] = [
        (module, name, False) for name in ("toggle_optimizer", "untoggle_optimizer")
    ]
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            wrapped += [(callback, name, True) for name in ("on_fit_start", "on_train_epoch_start")]
    undo: list[Callable[[], object]] = []
    for owner, name, by_value in wrapped:
        vars(owner)[name] = partial(_on_parameters, engine, getattr(owner, name), by_value)
        undo.append(partial(vars(owner).pop, name, None))
    return undo


def _on_parameters(engine: Engine, method: Callable[..., Any], by_value: bool, *args: Any) -> None:
    with ExitStack() as stack:
        if by_value:
            stack.enter_context(engine.full_parameters())
        for shards in engine.optimizers:
            stack.enter_context(shards.on_parameters())
        method(*args)
