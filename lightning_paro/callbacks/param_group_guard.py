"""Learning rates keep the ratios of the plan, whatever a scheduler or a tuner does."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_paro.algorithms.supar.scales import passed_by
from lightning_paro.callbacks._accord import in_accord
from lightning_paro.state_access import parameter_of, state_access

__all__ = ["ParamGroupGuard"]

TOLERANCE = 1e-4
"""Relative: schedulers multiply step by step."""


class ParamGroupGuard(Callback):
    """Before each step, looks whether the groups' learning rates are in the ratios of ``supar_param_groups``.

    Schedulers that multiply all groups keep them, such as LambdaLR, and OneCycleLR with one ``max_lr`` a group. Those
    that set one number for all do not, such as CosineAnnealingLR with a positive ``eta_min``, or ReduceLROnPlateau at
    its ``min_lr``. The learning rate finder, which does so too, is refused by the module.

    A module with a plan has to have optimizers with these groups, of the kind that they are for. Before the first step
    every factor of the forward has to have been used by the weights that have a gradient.

    Raises:
        ValueError: If the optimizer does not go by the plan.
        RuntimeError: If the ratios are broken, it says by what; or a factor was passed by.
    """

    def __init__(self) -> None:
        self._is_checked = False
        self._groups = 0  # how many there were when they were looked at

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_checked, self._groups = False, 0
        plan = getattr(pl_module, "supar_plan", None)
        groups = [
            (optimizer, g) for optimizer in trainer.optimizers for g in optimizer.param_groups if "lr_factor" in g
        ]
        if plan is not None and trainer.optimizers and not groups:
            raise ValueError(
                f"{type(pl_module).__name__} has a plan, but no optimizer has its learning rates. HINT: "
                "configure_optimizers returns for example torch.optim.AdamW(self.supar_param_groups(lr=1e-2))."
            )
        for optimizer, group in groups:
            _check_rule(type(optimizer).__name__, optimizer, group.get("rule"))
        self._check_groups(trainer, pl_module)

    def _check_groups(self, trainer: Trainer, module: LightningModule) -> None:
        """What the plan knows is in groups with its factors, also what is unfrozen into a group of its own."""
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        plan, start = getattr(module, "supar_plan", None), getattr(module, "_supar_prefix", "")
        if plan is None or len(groups) == self._groups:
            return
        self._groups = len(groups)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        with in_accord("ParamGroupGuard", trainer.world_size, dict):
            for group in groups:
                own = [p if (whole := parameter_of(p)) is None else whole for p in group["params"]]
                known = {names.get(id(p), "").removeprefix(start) for p in own} & plan.keys()
                if known and "lr_factor" not in group:
                    name = min(known)
                    raise ValueError(
                        f"'{name}' is in a param group of lr={float(group['lr']):.4g} without the plan's factor, which "
                        f"is {plan[name].lr_factor:.4g} with Adam and {plan[name].sgd_lr_factor:.4g} with SGD. HINT: "
                        "groups of supar_param_groups, of all that is trained now or later; or a group with "
                        f"lr_factor={plan[name].lr_factor:.4g}, and that times the base model's rate as lr."
                    )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self._is_checked:
            self._is_checked = True
            _check_factors(trainer, pl_module)
        self._check_groups(trainer, pl_module)
        groups = [group for group in optimizer.param_groups if "lr_factor" in group]
        bases = [float(group["lr"]) / group["lr_factor"] for group in groups]
        if not bases or math.isclose(min(bases), max(bases), rel_tol=TOLERANCE):
            return
        low, high = groups[bases.index(min(bases))], groups[bases.index(max(bases))]
        raise RuntimeError(
            f"{_culprit(trainer)} has broken the ratios of SμPar's learning rates: {float(high['lr']):.4g} "
            f"where the plan's factor is {high['lr_factor']:.4g}, but {float(low['lr']):.4g} where it is "
            f"{low['lr_factor']:.4g}; expected the same base rate, and it is {max(bases):.4g} and {min(bases):.4g}. "
            "HINT: a scheduler that multiplies all groups, as LambdaLR; or one number a group, as "
            "OneCycleLR(max_lr=[group['lr'] for group in groups])."
        )


def _check_rule(name: str, optimizer: torch.optim.Optimizer, rule: str | None) -> None:
    """Factors of Adam are for optimizers that normalise gradients as it does, those of SGD for SGD."""
    is_sgd = isinstance(optimizer, torch.optim.SGD) or "sgd" in name.lower()
    if rule == "sgd" and not is_sgd or rule == "adamw" and is_sgd:
        raise ValueError(
            f"{name} has param groups by the rules of {rule}. HINT: "
            f"supar_param_groups(..., optimizer={'sgd' if is_sgd else 'adamw'!r})."
        )
    if rule == "adamw" and "adam" not in name.lower():
        rank_zero_warn(
            f"{name} has param groups by the rules of Adam, and its own are not known. HINT: AdamW, or derive them, "
            "and set lr_factor in overrides."
        )


def _check_factors(trainer: Trainer, module: LightningModule) -> None:
    """A table or an output layer whose weight is read past the module has lost its factor."""
    shards = state_access(trainer).trainable_shards()
    grads = {name: shard.grad for name in passed_by(module) if (shard := shards.get(f"{name}.weight")) is not None}
    lost = [name for name, grad in grads.items() if grad is not None and bool(grad.any())]
    if trainer.strategy.reduce_boolean_decision(bool(lost), all=False):  # a rank may hold none of it
        name = lost[0] if lost else "a table or an output layer"
        raise RuntimeError(
            f"the weight of '{name}' was trained, but the module was never called, so nothing was multiplied by its "
            "factor. HINT: call the module instead of reading its weight; or give the weight another role, by "
            f"overrides={{'{name}.weight': {{'role': 'vector'}}}}."
        )


def _culprit(trainer: Trainer) -> str:
    """What has last set the learning rates."""
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    return " or ".join(schedulers) or "something"
