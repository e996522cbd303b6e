"""Activation checkpointing: what a block computed in forward is computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_activations", "module_classes"]


def module_classes(argument: str, value: Any) -> tuple[type[nn.Module], ...]:
    """One class, several or None, as a tuple.

    Raises:
        ValueError: If anything else is among them.
    """
    classes = () if value is None else (value,) if isinstance(value, type) else tuple(value)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise ValueError(f"{argument}={value!r} must name subclasses of torch.nn.Module and nothing else.")
    return classes


def checkpoint_activations(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[Callable[[], object]]:
    """Let the forward of every module of one of ``classes`` be recomputed in backward; names stay as they are.

    Returns:
        What undoes it.

    Raises:
        ValueError: If there is no such module.
    """
    chosen = [child for child in root.modules() if isinstance(child, classes)]
    if classes and not chosen:
        names = ", ".join(kind.__name__ for kind in classes)
        raise ValueError(
            f"activation_checkpointing={names} selects no module of {type(root).__name__}. HINT: name the class of the "
            "model's repeated block."
        )
    for child in chosen:
        child.forward = partial(checkpoint, child.forward, use_reentrant=False)
    return [partial(child.__dict__.pop, "forward", None) for child in chosen]
