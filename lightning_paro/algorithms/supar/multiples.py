"""How many times as wide as the base model's every tensor is, in and out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_paro.algorithms.supar.roles import TensorRole, Tensors, find_roles, width_of
from lightning_paro.algorithms.supar.rules import Role

__all__ = ["multiples", "pattern_of"]


def multiples(
    model: nn.Module, tensors: Tensors, base_width: int | None, base_config: Any, roles: Mapping[str, Role]
) -> dict[str, tuple[float, float]]:
    """Fan-in and fan-out of every tensor as multiples of the base model's."""
    if (base_width is None) == (base_config is None):
        raise ValueError(
            f"base_width={base_width}, base_config={'given' if base_config is not None else None}: expected one of "
            "them. HINT: base_width is the width of the model that the hyperparameters were tuned on."
        )
    if base_config is not None:
        return _compared(tensors, _base_tensors(model, base_config, roles))
    if isinstance(base_width, bool) or not isinstance(base_width, int) or base_width < 1:
        raise ValueError(f"base_width={base_width!r} must be a whole number, 1 or more.")
    m = width_of(model, tensors) / base_width
    of_output = {f"{name.rpartition('.')[0]}.bias" for name, tensor in tensors.items() if tensor.role == "output"}
    both: dict[Role, tuple[float, float]] = {"embedding": (1, m), "hidden": (m, m), "output": (m, 1), "vector": (1, m)}
    return {n: (1.0, 1.0) if n in of_output else both[tensor.role] for n, tensor in tensors.items()}


def _base_tensors(model: nn.Module, base: Any, roles: Mapping[str, Role]) -> Tensors:
    """The base model's tensors, under the names that they would have in the model."""
    for name, module in model.named_modules():
        made = base if type(module) is type(base) else None
        if type(getattr(module, "config", None)) is type(base):
            with torch.device("meta"):
                made = type(module)(base)
        if made is not None:
            start = f"{name}." if name else ""
            told = {pattern.removeprefix(start): role for pattern, role in roles.items()}
            return {start + own: tensor for own, tensor in find_roles(made, told).items()}
    if isinstance(base, nn.Module):
        return find_roles(base, roles)
    raise ValueError(
        f"base_config is a {type(base).__name__}, and no part of {type(model).__name__} is built from one. HINT: a "
        "config of the class of the model's own, or the base model itself, which may be on the meta device."
    )


def _compared(tensors: Tensors, base: Tensors) -> dict[str, tuple[float, float]]:
    """The base may have fewer or more layers: then a tensor is compared with that of any layer."""
    by_pattern: dict[str, set[TensorRole]] = {}
    for name, tensor in base.items():
        by_pattern.setdefault(pattern_of(name), set()).add(tensor)
    found = {}
    for name, tensor in tensors.items():
        alike = by_pattern.get(pattern_of(name), set())
        other = base.get(name) or (next(iter(alike)) if len(alike) == 1 else None)
        if other is None or len(other.shape) != len(tensor.shape):
            what = "has none" if other is None else f"has {other.shape}"
            raise ValueError(
                f"'{name}' has shape {tensor.shape}, the base model {what}. HINT: they differ in widths only."
            )
        m_in = _fan_in(tensor) / _fan_in(other)
        found[name] = (m_in, tensor.fan_out / other.fan_out)
    return found


def _fan_in(tensor: TensorRole) -> int:
    """The rows of a table are looked up, not summed over, so their number does not matter."""
    return 1 if tensor.role == "embedding" else tensor.fan_in


def pattern_of(name: str) -> str:
    """A name without the numbers of layers."""
    return re.sub(r"\b\d+\b", "*", name)
