"""Learning rates keep the ratios of the plan, whatever a scheduler or a tuner does."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from typing_extensions import override

__all__ = ["ParamGroupGuard"]

TOLERANCE = 1e-4
"""Relative: schedulers multiply step by step."""


class ParamGroupGuard(Callback):
    """Before each step, looks whether the groups' learning rates are in the ratios of ``supar_param_groups``.

    Schedulers that multiply all groups keep them, such as LambdaLR, and OneCycleLR with one ``max_lr`` a group. Those
    that set one number for all do not, such as CosineAnnealingLR with a positive ``eta_min``, ReduceLROnPlateau at its
    ``min_lr``, or the learning rate finder, whose suggestion is for one learning rate anyway.

    Raises:
        RuntimeError: If the ratios are broken; it says by what.
    """

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        groups = [group for group in optimizer.param_groups if "lr_factor" in group]
        bases = [float(group["lr"]) / group["lr_factor"] for group in groups]
        if not bases or math.isclose(min(bases), max(bases), rel_tol=TOLERANCE):
            return
        low, high = groups[bases.index(min(bases))], groups[bases.index(max(bases))]
        raise RuntimeError(
            f"{_culprit(trainer, optimizer)} has broken the ratios of SμPar's learning rates: {float(high['lr']):.4g} "
            f"where the plan's factor is {high['lr_factor']:.4g}, but {float(low['lr']):.4g} where it is "
            f"{low['lr_factor']:.4g}; expected the same base rate, and it is {max(bases):.4g} and {min(bases):.4g}. "
            "HINT: a scheduler that multiplies all groups, as LambdaLR; or one number a group, as "
            "OneCycleLR(max_lr=[group['lr'] for group in groups])."
        )


def _culprit(trainer: Trainer, optimizer: Any) -> str:
    """What has last set the learning rates."""
    has_finder = any(isinstance(callback, LearningRateFinder) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if has_finder and len({float(group["lr"]) for group in optimizer.param_groups}) == 1:
        return "the learning rate finder (lr_find)"
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    return " or ".join(schedulers) or "something"
