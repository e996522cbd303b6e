"""Initial values by the plan, from a seed and the tensors' names alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_paro.algorithms.supar.masks import generator_of
from lightning_paro.algorithms.supar.plan import SuParPlan
from lightning_paro.algorithms.supar.roles import TABLES

__all__ = ["check_names", "initialize", "prefix_of"]


def prefix_of(model: nn.Module, plan: SuParPlan) -> str:
    """What stands in front of the plan's names in a model's: nothing, or the path of the part it was made for.

    Raises:
        ValueError: If the model has other tensors than the plan, or of other shapes.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    prefixes = ["", *(f"{name}." for name, _ in model.named_modules() if name)]
    fitting = [prefix for prefix in prefixes if all(prefix + name in shapes for name in plan)]
    if len(fitting) > 1 and fitting[0]:
        parts = ", ".join(prefix.rstrip(".") for prefix in fitting)
        raise ValueError(
            f"the plan's names fit several parts of {type(model).__name__}: {parts}. HINT: make the plan of the whole: "
            "SuParPlan.from_model(self, ...), or set up a part before the others are there."
        )
    prefix = fitting[0] if fitting else None
    if prefix is None:
        lost = next(name for name in plan if name not in shapes)
        raise ValueError(
            f"the plan has '{lost}', which {type(model).__name__} has not. HINT: make the plan of this model: "
            "SuParPlan.from_model(self, ...)."
        )
    for name, entry in plan.items():
        if shapes[prefix + name] != entry.shape:
            raise ValueError(
                f"'{prefix}{name}' has shape {shapes[prefix + name]}, and {entry.shape} in the plan. HINT: make the "
                "plan of this model."
            )
    return prefix


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a model whose parameters were renamed since it was set up: no rule would find them.

    Args:
        model: As it is now.
        names: Of parameters, as they were.

    Raises:
        ValueError: If one is not there.
    """
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if lost := [name for name in names if name not in there]:
        own = lost[0].rpartition(".")[2]
        found = next((name for name in there if own in name.split(".")), "others")
        raise ValueError(
            f"{len(lost)} parameters of the plan, such as '{lost[0]}', are no longer in {type(model).__name__}, which "
            f"has '{found}'. HINT: wrap modules before supar_setup, or compile them in place, by self.model.compile()."
        )


@torch.no_grad()
def initialize(model: nn.Module, plan: SuParPlan, prefix: str = "") -> None:
    """Draw every tensor that the plan has a standard deviation for, and set to zero what its mask does not keep.

    Values are drawn on the host, so they do not depend on the device, nor on the order in which a model is built; no
    other generator is touched.

    Args:
        model: With real tensors that are not sharded yet.
        plan: What to draw.
        prefix: What stands in front of its names in the model's.

    Raises:
        ValueError: If a tensor is on the meta device, or sharded.
    """
    parameters = dict(model.named_parameters())
    padding = {id(m.weight): m.padding_idx for m in model.modules() if isinstance(m, TABLES)}
    for name, entry in plan.items():
        parameter = parameters[prefix + name]
        if parameter.is_meta or isinstance(parameter, DTensor):
            what = "on the meta device" if parameter.is_meta else "sharded already"
            raise ValueError(
                f"'{prefix}{name}' is {what}, so it cannot be initialised. HINT: call supar_setup in __init__ or in "
                "configure_model on real tensors, before anything wraps or shards the model."
            )
        if entry.init_std is not None:
            drawn = torch.zeros(entry.shape, dtype=torch.float32, device="cpu")  # whatever the defaults are
            if entry.init_std:
                drawn.normal_(0, entry.init_std, generator=generator_of(plan.masks.seed, f"init {name}"))
            parameter.copy_(drawn)
            if (row := padding.get(id(parameter))) is not None:
                parameter[row] = 0  # which is never trained
        if entry.rho < 1:
            parameter.mul_(plan.mask(name).to(parameter.device))
