"""The masks of a module, where its state dict has them: drawn from the seed when asked for, unless one was loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.masks import check_mask
from lightning_paro.algorithms.supar.plan import Entry, SuParPlan

__all__ = ["SUFFIX", "MaskState"]

SUFFIX = "_mask"
"""What is appended to a parameter's name."""


class MaskState:
    """Puts masks into a module's state dict, as bool tensors beside the parameters, and takes them out of a loaded one.

    No mask is kept that the seed can draw again, so nothing of theirs is in memory, or is moved, cast or broadcast with
    the module.

    Args:
        plan: The plan, or what makes it when it is first needed: layers may not be there before.
        prefix: What stands in front of its names in the module's.
    """

    def __init__(self, plan: SuParPlan | Callable[[nn.Module], SuParPlan], prefix: str = "") -> None:
        self._plan = plan
        self._prefix = prefix
        self._loaded: dict[str, Tensor] = {}

    def attach(self, module: nn.Module) -> None:
        """From now on the module's state dict has masks, and a loaded one may."""
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
        """The mask of a parameter, whole and on the host: the loaded one if there is one."""
        if name in self._loaded:
            return self._loaded[name]
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
                check_mask(name, loaded, entry.shape)
                if (rho := int(loaded.sum()) / loaded.numel()) != entry.rho:
                    raise ValueError(
                        f"the loaded mask of '{name}' keeps {rho:.6g} of the weights, the plan says {entry.rho:.6g}. "
                        "HINT: make the plan with the density, kind and seed of the run that was saved."
                    )
            except ValueError as error:
                errors.append(str(error))
                continue
            own = self.plan(module).mask(name) if entry.rho < 1 else None
            if own is None or not torch.equal(own, loaded.cpu()):
                self._loaded[self._prefix + name] = loaded.cpu().clone()
            else:
                self._loaded.pop(self._prefix + name, None)
