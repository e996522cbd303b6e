"""Modules that were built on the meta device get real tensors; only rank 0's values matter, they win."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

__all__ = ["has_meta_tensors", "materialize"]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


def materialize(module: nn.Module, initialize: bool) -> None:
    """Replace meta tensors by host tensors, ties kept.

    Args:
        module: Changed in place.
        initialize: Whether to fill them, by ``initialize_weights`` of transformers models and ``reset_parameters`` of
            other modules; without it they hold whatever was in memory.

    Raises:
        TypeError: If a module with meta tensors has neither method.
    """
    if not has_meta_tensors(module):
        return
    real: dict[int, Any] = {}
    touched: list[nn.Module] = []
    for child in module.modules():
        tensors = {**child._parameters, **child._buffers}
        meta = {name: t for name, t in tensors.items() if t is not None and t.is_meta}
        for name, tensor in meta.items():
            if id(tensor) not in real:
                empty: Any = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                real[id(tensor)] = empty
            store: dict[str, Any] = child._parameters if name in child._parameters else child._buffers
            store[name] = real[id(tensor)]
        if meta:
            touched.append(child)
    pretrained = [m for m in module.modules() if hasattr(m, "initialize_weights") and hasattr(m, "tie_weights")]
    inside = {id(child) for model in pretrained for child in model.modules()}
    others = [child for child in touched if id(child) not in inside]
    for child in others:  # raised on every rank, whether it initialises or not
        if not hasattr(child, "reset_parameters"):
            raise TypeError(
                f"{type(child).__name__} was built on the meta device but has no reset_parameters() to initialise "
                "itself. HINT: define reset_parameters, or build the module without the meta device."
            )
    if not initialize:
        return
    with torch.random.fork_rng(devices=[]):  # the ranks' generators stay in step
        for model in pretrained:
            cast(Any, model).initialize_weights()
        for child in others:
            cast(Any, child).reset_parameters()
