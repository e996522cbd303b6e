"""What is known of an optimizer by its class."""

from __future__ import annotations

import torch

from lightning_paro.sharding import ELEMENTWISE

__all__ = ["is_elementwise"]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to move each element by its own gradient and state alone."""
    return type(optimizer) in ELEMENTWISE
