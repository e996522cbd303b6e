"""What breaks the ratios of learning rates is named; what keeps them passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_paro.callbacks import ParamGroupGuard
from tests.distributed.supar import LR, Net, Plain, batches, train


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


def test_the_finder_of_learning_rates_is_refused() -> None:
    finder = LearningRateFinder(num_training_steps=30, early_stop_threshold=None)
    with pytest.raises(RuntimeError, match=r"^the learning rate finder \(lr_find\) trains without masks.* HINT: "):
        train(build=lambda: Scheduled(KEEPING["LambdaLR"]), callbacks=[finder])
    module = Scheduled(KEEPING["LambdaLR"])
    tuner = Tuner(Trainer(accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False))
    with pytest.raises(RuntimeError, match=r"^the learning rate finder \(lr_find\) trains without masks"):
        tuner.lr_find(module, DataLoader(batches(4), batch_size=None), num_training=8)


def test_the_batch_size_finder_is_not() -> None:
    class Sized(Net):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return DataLoader(batches(1)[0], batch_size=self.batch_size)

    finder = BatchSizeFinder(max_trials=1, steps_per_trial=1)
    trainer = Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[finder],
    )  # fmt: skip
    module = Sized()
    trainer.fit(module)
    assert all(not module.get_parameter(name)[~module.supar_plan.mask(name)].any() for name in module.supar_plan.sparse)  # type: ignore[union-attr]


def by_hand(module: Any) -> Any:
    return torch.optim.AdamW([{"params": [p], "lr": 10.0**-i} for i, p in enumerate(module.parameters())])


def test_an_optimizer_without_the_plans_groups_is_refused() -> None:
    class Alike(Net):
        def configure_optimizers(self) -> Any:
            return by_hand(self)

    with pytest.raises(ValueError, match="Alike has a plan, but no optimizer has its learning rates. HINT: configure"):
        train(build=Alike)


def test_groups_are_for_one_kind_of_optimizer() -> None:
    class Other(Net):
        def __init__(self, kind: Any, rule: Any) -> None:
            super().__init__()
            self.kind, self.rule = kind, rule

        def configure_optimizers(self) -> Any:
            return self.kind(self.supar_param_groups(1e-3, optimizer=self.rule), lr=1e-3)

    with pytest.raises(ValueError, match="SGD has param groups by the rules of adamw. HINT: .*optimizer='sgd'"):
        train(build=lambda: Other(torch.optim.SGD, "adamw"), steps=1)
    with pytest.raises(ValueError, match="Adam has param groups by the rules of sgd. HINT: .*optimizer='adamw'"):
        train(build=lambda: Other(torch.optim.Adam, "sgd"), steps=1)
    with pytest.warns(UserWarning, match="RMSprop has param groups by the rules of Adam, and its own are not known"):
        train(build=lambda: Other(torch.optim.RMSprop, "adamw"), steps=1)
    train(build=lambda: Other(torch.optim.SGD, "sgd"), steps=1)


def test_modules_without_a_plan_are_left_alone() -> None:
    class Free(Plain):
        def configure_optimizers(self) -> Any:
            return by_hand(self)

    train(build=Free, callbacks=[ParamGroupGuard()])


class PassedBy(Net):
    """Reads the weight of a table, or of the head, past the module."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding.weight[tokens] if self.what == "embedding" else self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.linear(x, self.head.weight) if self.what == "head" else self.head(x)


@pytest.mark.parametrize("what", ["embedding", "head"])
def test_a_weight_that_is_read_past_its_module_is_told(what: str) -> None:
    with pytest.raises(RuntimeError, match=f"the weight of '{what}' was trained, but the module was never called"):
        train(build=lambda: PassedBy(what))
    train(build=lambda: PassedBy("nothing"), steps=1)
