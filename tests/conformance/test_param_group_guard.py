"""What breaks the ratios of learning rates is named; what keeps them passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch.optim import lr_scheduler

from lightning_paro.callbacks import ParamGroupGuard
from tests.distributed.supar import LR, Net, train


class Scheduled(Net):
    def __init__(self, make: Any) -> None:
        super().__init__(density=0.25)  # m_d * rho is a half, so hidden weights have twice the rate
        self.make = make
        self.lr = LR

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.supar_param_groups(self.lr))
        schedule = self.make(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "loss", "strict": False}]


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


KEEPING = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=4),
    "CosineAnnealingLR to zero": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "OneCycleLR with one a group": lambda o: lr_scheduler.OneCycleLR(o, rates(o), total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}
BREAKING = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=LR, total_steps=20),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=LR / 10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, LR / 10, LR, cycle_momentum=False),
}


@pytest.mark.parametrize("name", KEEPING)
def test_what_keeps_the_ratios_passes(name: str) -> None:
    train(build=lambda: Scheduled(KEEPING[name]))


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_them_is_named(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{name} has broken the ratios of .* expected the same base rate.* HINT: "):
        train(build=lambda: Scheduled(BREAKING[name]))


def test_a_plateau_at_its_least_rate() -> None:
    class Plateau(Net):
        def __init__(self) -> None:
            super().__init__(density=0.25)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.supar_param_groups(LR))
            schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=LR / 50)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "monitor": "flat"}]

        def training_step(self, batch: Any, index: int) -> Any:
            self.log("flat", 1.0)
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="^ReduceLROnPlateau has broken"):
        train(build=Plateau, steps=8)


def test_the_finder_of_learning_rates_is_named() -> None:
    finder = LearningRateFinder(num_training_steps=30, early_stop_threshold=None)
    with pytest.raises(RuntimeError, match=r"^the learning rate finder \(lr_find\) has broken"):
        train(build=lambda: Scheduled(KEEPING["LambdaLR"]), callbacks=[finder])


def test_other_optimizers_are_left_alone() -> None:
    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([{"params": [p], "lr": 10.0**-i} for i, p in enumerate(self.parameters())])

    train(build=Plain, callbacks=[ParamGroupGuard()])
