"""What of a LightningModule is exported: the part that the plan is of, whole and on one device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_paro.algorithms.supar.mask_state import MaskState, attached
from lightning_paro.algorithms.supar.plan import SuParPlan

__all__ = ["copied", "inner_of", "masks_of", "plan_of"]


def plan_of(module: nn.Module) -> SuParPlan:
    """The plan that a module was set up with.

    Raises:
        ValueError: If there is none, or the parameters are not all here.
    """
    plan = getattr(module, "supar_plan", None)
    if plan is None:
        raise ValueError(
            f"{type(module).__name__} has no plan; expected a LightningModule with SuParMixin. HINT: call "
            "supar_setup(plan) before."
        )
    for name, part in module.named_modules():
        if (compiled := getattr(part, "_orig_mod", None)) is not None:
            raise ValueError(
                f"'{name}' is a compiled {type(compiled).__name__}, whose factors are in its graph. HINT: export "
                "a module that is not compiled and has its weights, and compile the result."
            )
    for name, parameter in module.named_parameters():
        what = _where(parameter)
        if what is not None:
            raise ValueError(
                f"'{name}' {tuple(parameter.shape)} is {what}; expected a whole tensor. HINT: load a checkpoint into a "
                "new module on one device, and export that."
            )
    return plan  # type: ignore[no-any-return]


def inner_of(module: nn.Module) -> tuple[nn.Module, str]:
    """The child that holds all of the plan's tensors, and what stands before the names in it; else the module."""
    names = [f"{module._supar_prefix}{name}" for name in plan_of(module)]
    for name, child in module.named_children():
        if all(own.startswith(f"{name}.") for own in names):
            return child, f"{name}."
    return module, ""


def masks_of(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """By the module's names, the masks, whole and on the host, and their dimension of fan-in.

    Raises:
        ValueError: If a weight that is masked is not zero.
    """
    state = attached(module)
    for name in state.names(module) if state is not None else ():
        mask, weight = state.mask(module, name), module.get_parameter(name)  # type: ignore[union-attr]
        if alive := int(weight.detach()[~mask.to(weight.device)].count_nonzero()):
            raise ValueError(
                f"{alive} of the {int((~mask).sum())} masked weights of '{name}' are not zero. HINT: train with "
                "SparseMask, or multiply the weight with its mask."
            )
        yield name, mask, state.entry(module, name).axis  # type: ignore[union-attr]


def copied(module: nn.Module) -> nn.Module:
    """A copy of the inner model, in eval mode, that knows nothing of the plan; factors are still in it."""
    inner, _ = inner_of(module)
    result: Any = copy.deepcopy(inner).eval()
    if inner is module:  # the plan, and masks in the state dict
        result.supar_plan = result.supar_masks = None
        result.hparams.pop("supar_plan", None)
        for hooks in (result._state_dict_hooks, result._load_state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if _is_of_masks(hook)]:
                del hooks[key]
    return result  # type: ignore[no-any-return]


def _where(parameter: Tensor) -> str | None:
    """Where the values are, if not here."""
    if hasattr(type(parameter), "_paro_where"):
        return "released by ParoStrategy"
    return "sharded" if isinstance(parameter, DTensor) else "on the meta device" if parameter.is_meta else None


def _is_of_masks(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    method = hook.func if isinstance(hook, partial) else hook
    return isinstance(getattr(method, "__self__", None), MaskState)
