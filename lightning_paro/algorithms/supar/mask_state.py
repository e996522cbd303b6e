"""The masks of a module, where its state dict has them: drawn from the seed, unless one was loaded or has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.masks import check_mask, load_masks
from lightning_paro.algorithms.supar.plan import Entry, SuParPlan

__all__ = ["SUFFIX", "MaskState", "attached"]

SUFFIX = "_mask"
"""What is appended to a parameter's name."""


_ATTRIBUTE = "_sparse_masks"


def attached(module: nn.Module) -> MaskState | None:
    """Where a module's masks come from, if it has any, whoever brought them."""
    found: MaskState | None = vars(module).get(_ATTRIBUTE)
    return found


class MaskState:
    """Puts masks into a module's state dict, as bool tensors beside the parameters, and takes them out of a loaded one.

    No mask is kept that the seed can draw again, so nothing of theirs is in memory, or is moved, cast or broadcast with
    the module.

    Args:
        plan: The plan, or what makes it when it is first needed: layers may not be there before.
        prefix: What stands in front of its names in the module's.
        is_dense_first: Masks keep everything at first, and the plan says what pruning leaves in the end.
    """

    def __init__(
        self, plan: SuParPlan | Callable[[nn.Module], SuParPlan], prefix: str = "", is_dense_first: bool = False
    ) -> None:
        self._plan = plan
        self._prefix = prefix
        self._is_dense_first = is_dense_first
        self._others: dict[str, Tensor] = {}  # loaded or changed: those that are not the first ones

    def check(self, module: nn.Module) -> None:
        """Refuse a module that has something of its own where its masks are to stand in the state dict.

        Raises:
            ValueError: If it has.
        """
        own = {name for name, _ in (*module.named_buffers(), *module.named_parameters())}
        if taken := [name for name in self.names(module) if f"{name}{SUFFIX}" in own]:
            raise ValueError(
                f"{type(module).__name__} has '{taken[0]}{SUFFIX}' already, where the state dict is to have the mask "
                f"of '{taken[0]}'. HINT: another name for it, or exclude=('{taken[0]}',)."
            )

    def attach(self, module: nn.Module) -> None:
        """From now on the module's state dict has masks, and a loaded one may; :func:`attached` finds them."""
        vars(module)[_ATTRIBUTE] = self
        module.register_state_dict_post_hook(partial(self._save))  # torch marks hooks, which methods do not allow
        module.register_load_state_dict_pre_hook(self._load)

    def plan(self, module: nn.Module) -> SuParPlan:
        """The plan that masks are drawn by."""
        if not isinstance(self._plan, SuParPlan):
            self._plan = self._plan(module)
        return self._plan

    def names(self, module: nn.Module) -> list[str]:
        """Names of the parameters that have a mask."""
        return [self._prefix + name for name in self.plan(module).sparse]

    def entry(self, module: nn.Module, name: str) -> Entry:
        """What the plan says of a parameter."""
        return self.plan(module)[name.removeprefix(self._prefix)]

    def mask(self, module: nn.Module, name: str) -> Tensor:
        """The mask of a parameter, whole and on the host: the one that was loaded or set last, if there is one."""
        masks = self.plan(module).masks
        if masks.path is not None and name not in self._others:  # the file may change, or go
            read = {self._prefix + own: mask.clone() for own, mask in load_masks(masks.path).items()}
            self._others = read | self._others
        return self._others[name] if name in self._others else self._first(module, name)

    def replace(self, name: str, mask: Tensor) -> None:
        """Set the mask of a parameter: bool, whole, of its shape. It is kept on the host, and saved from now on."""
        self._others[name] = mask.cpu()

    def _first(self, module: nn.Module, name: str) -> Tensor:
        if self._is_dense_first:
            return torch.ones(self.entry(module, name).shape, dtype=torch.bool, device="cpu")
        return self.plan(module).mask(name.removeprefix(self._prefix))

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in self.names(module):
            state[f"{prefix}{name}{SUFFIX}"] = self.mask(module, name)
            owner, _, own = name.rpartition(".")
            # torch's distributed checkpoints look for an attribute of every entry; what it is does not matter
            vars(module.get_submodule(owner)).setdefault(f"{own}{SUFFIX}", None)

    def _load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        plan = self.plan(module)
        for name, entry in plan.items():
            loaded = state.pop(f"{prefix}{self._prefix}{name}{SUFFIX}", None)
            if loaded is None:
                continue
            try:
                loaded = _as_bool(name, loaded)
                is_before = self._is_dense_first and int(loaded.count_nonzero()) / loaded.numel() > entry.rho
                check_mask(name, loaded, entry.shape, None if is_before else entry.rho)
            except ValueError as error:
                errors.append(str(error))
                continue
            full = self._prefix + name
            if entry.rho < 1 and torch.equal(self._first(module, full), loaded.cpu()):
                self._others.pop(full, None)
            else:
                self._others[full] = loaded.cpu().clone()


def _as_bool(name: str, mask: Tensor) -> Tensor:
    """A mask that was cast with all else of its state dict."""
    if mask.dtype is not torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"the mask of '{name}' has other numbers than 0 and 1. HINT: a state dict whose masks were only cast."
        )
    return mask.bool()
