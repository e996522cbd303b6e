"""Steps that an optimizer makes, whoever asks it to."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Stepped"]


class Stepped:
    """Counts the steps of an optimizer, to find those that Lightning does not see.

    Attributes:
        count: How many since it was attached.
    """

    def __init__(self) -> None:
        self.count = 0
        self._depth = 0
        self._handles: list[Any] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to count."""
        self.detach()
        self.count, self._depth = 0, 0
        self._handles = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def detach(self) -> None:
        """Stop."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, *_: Any) -> None:
        self._depth += 1

    def _end(self, *_: Any) -> None:
        """A step that calls its base class's is one."""
        self._depth -= 1
        self.count += self._depth == 0
