"""Where a parameter lies in a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Slot"]


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a flat buffer, and which part of it is in this rank's optimizer shard.

    Attributes:
        name: The parameter's first name in the root module.
        parameter: The module's own parameter.
        start: First element in the flat buffer.
        numel: Number of elements.
        shape: Shape of the whole parameter.
        shard: Elements of this rank's optimizer shard that belong to the parameter; empty if none do.
        offset: Which element of the flattened parameter the shard starts with.
    """

    name: str
    parameter: nn.Parameter
    start: int
    numel: int
    shape: torch.Size
    shard: slice
    offset: int

    @property
    def is_empty(self) -> bool:
        """Whether this rank's optimizer shard holds nothing of the parameter; one without elements is on every rank."""
        return self.numel > 0 and bool(self.shard.start == self.shard.stop)
