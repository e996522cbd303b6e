"""How large activations are, module by module: what a coordinate check looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.roles import find_roles
from lightning_paro.sharding import repeated_blocks

__all__ = ["Activations", "watched"]


def watched(model: nn.Module) -> list[str]:
    """Names of the modules that are worth watching: the repeated blocks, and every module with a matrix.

    Args:
        model: Any module; matrices without a role do not matter.
    """
    told = {name: "vector" for name, parameter in model.named_parameters() if parameter.ndim > 1}
    matrices = {name.rpartition(".")[0] for name in find_roles(model, told) if name in told}  # type: ignore[arg-type]
    blocks = repeated_blocks(model)
    return [name for name, _ in model.named_modules() if name in matrices or name in blocks]


class Activations:
    """The mean absolute value of what modules put out, since it was last read.

    Nothing waits for the device before :meth:`read`.

    Args:
        model: The model.
        names: Names of the modules to watch.

    Attributes:
        is_paused: Whether calls do not count for now.

    Raises:
        ValueError: If one of them is not there.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.is_paused = False
        modules = dict(model.named_modules())
        lost = [name for name in names if name not in modules]
        if lost:
            raise ValueError(f"there is no module {lost[0]!r} to watch. HINT: names as of model.named_modules().")
        self._sums: dict[str, list[Tensor]] = {name: [] for name in names}
        self._handles = [modules[name].register_forward_hook(_Note(self, sums)) for name, sums in self._sums.items()]

    def read(self) -> dict[str, float]:
        """By module the mean over all calls since the last time; modules that were not called are left out."""
        found = {name: torch.stack(sums).mean().item() for name, sums in self._sums.items() if sums}
        for sums in self._sums.values():
            sums.clear()
        return found

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Note:
    def __init__(self, owner: Activations, sums: list[Tensor]) -> None:
        self._owner = owner
        self._sums = sums

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._owner.is_paused:
            return
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            self._sums.append(first.detach().abs().float().mean())
