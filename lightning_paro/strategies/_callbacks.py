"""Callbacks of Lightning that read parameter values outside of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelSummary

from lightning_paro.sharding import Engine

__all__ = ["with_parameters"]


def with_parameters(
    engine: Engine, module: LightningModule, callbacks: Iterable[Callback]
) -> list[Callable[[], object]]:
    """Give callbacks whole parameters where they need them.

    Args:
        engine: The engine.
        module: One with an ``example_input_array`` is run by ModelSummary.
        callbacks: BaseFinetuning compares parameters by value.

    Returns:
        What undoes it.
    """
    undo: list[Callable[[], object]] = []
    for callback in callbacks:
        names: tuple[str, ...] = (
            ("on_fit_start", "on_train_epoch_start") if isinstance(callback, BaseFinetuning) else ()
        )
        if isinstance(callback, ModelSummary) and module.example_input_array is not None:
            names = ("on_fit_start",)
        for name in names:
            vars(callback)[name] = partial(_on_parameters, engine, getattr(callback, name))
            undo.append(partial(vars(callback).pop, name, None))
    return undo


def _on_parameters(engine: Engine, method: Callable[..., Any], *args: Any) -> None:
    with engine.full_parameters():
        method(*args)
