"""Callbacks of a run: whether it has the learning rate that is swept, and what its loss is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

__all__ = ["GivenRate", "HiddenRate", "Losses"]

TOLERANCE = 1e-4
"""Relative: of rates that went through a factor and back."""


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate that a group's schedule is a multiple of; of OneCycleLR its largest."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


class Losses(Callback):
    """Keeps the training losses."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep one more."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:
            raise ValueError(
                f"{type(module).__name__}.training_step: expected a loss of batch {batch_idx}, which a sweep compares, "
                "found none. HINT: return the loss from training_step, under manual optimization too."
            )
        self.seen.append(torch.as_tensor(loss).detach())


class GivenRate(Callback):
    """Refuses a module that does not use the learning rate it was given: all of its runs would be the same."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at all groups."""
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [_rate(group) / group.get("lr_factor", 1.0) for group in groups]
        if not any(math.isclose(rate, self.lr, rel_tol=TOLERANCE) for rate in rates):
            found = ", ".join(dict.fromkeys(f"{rate:.4g}" for rate in rates)) or "none"
            raise ValueError(
                f"mode='global', setting.lr={self.lr:.4g}: expected that base rate in a group of the optimizer of "
                f"{type(pl_module).__name__}, found {found}. HINT: the module has to take its learning rate from "
                "setting.lr."
            )


class HiddenRate(Callback):
    """Gives hidden weights a base learning rate of their own."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale their groups, and what schedulers have kept of them."""
        found = False
        for optimizer in trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                if not group.get("is_hidden"):
                    continue
                found = True
                scale = self.lr * group["lr_factor"] / _rate(group)
                # the guard compares rates with factors; OneCycleLR reads its largest and least from the group
                for key in ("lr", "initial_lr", "max_lr", "min_lr", "lr_factor"):
                    if key in group:
                        group[key] *= scale
                for config in trainer.lr_scheduler_configs:
                    scheduler: Any = config.scheduler
                    for each in getattr(scheduler, "_schedulers", [scheduler]):  # those of SequentialLR
                        if each.optimizer is optimizer and hasattr(each, "base_lrs"):
                            each.base_lrs[number] *= scale
        if not found:
            raise ValueError(
                f"mode='hidden', but the optimizer of {type(pl_module).__name__} has no group of hidden weights. HINT: "
                "give it supar_param_groups(...)."
            )
