"""LISA beside Lightning's other loops, and that a run leaves the module and the callback as they should be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Watch, fit, loader, quiet, trained, values
from tests.distributed.lisa import Net, loss_of, table

ALL = {name for name, _ in Net().named_parameters()}


class Evaluated(Net):
    """Also validates, tests and predicts; keeps what was trained meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[str]] = []
        self.lr = 1e-3

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(trained(self))
        self.log("val", loss_of(self, batch))

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]

    def val_dataloader(self) -> Any:
        return loader(2)

    test_dataloader = predict_dataloader = val_dataloader


def test_validation_in_the_middle_of_a_period_changes_nothing() -> None:
    watches = [Watch(), Watch()]
    _, whole = fit(LISA(interval=4, sampler=table), callbacks=[watches[0]], build=Net)
    _, module = fit(
        LISA(interval=4, sampler=table), callbacks=[watches[1]], build=Evaluated, val_check_interval=3,
        num_sanity_val_steps=2,
    )  # fmt: skip
    assert watches[0].trained == watches[1].trained
    assert watches[0].states == watches[1].states
    assert len(module.seen) == 2 + 2 * 2
    assert module.seen[:2] == [ALL, ALL]  # of the sanity check, before anything is frozen
    assert all(names < ALL for names in module.seen[2:])
    for name, value in values(whole).items():
        assert torch.equal(value, module.get_parameter(name)), name


def test_evaluation_alone_freezes_nothing() -> None:
    lisa, module = LISA(), Evaluated()
    trainer = quiet(callbacks=[lisa])
    trainer.validate(module)
    trainer.test(module)
    trainer.predict(module)
    assert module.seen == [ALL] * 4
    assert trained(module) == ALL
    assert (lisa.periods, lisa.active_layers, lisa.trainable) == ([], [], 0)
    trainer, module = fit(lisa, module)
    assert len(lisa.periods) == 1
    module.seen.clear()
    trainer.validate(module)
    trainer.test(module)
    assert module.seen == [ALL] * 4


def test_a_checkpoint_that_was_only_evaluated_is_not_resumed(tmp_path: Path) -> None:
    _, module = fit(LISA(interval=2, sampler=table, num_layers=2))
    first = LISA(interval=2, sampler=table)
    trainer, module = fit(first, build=Evaluated)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    lisa = LISA(interval=2, sampler=table)
    quiet(callbacks=[lisa]).test(Evaluated(), ckpt_path=tmp_path / "end.ckpt", weights_only=False)
    fit(lisa, build=Evaluated)
    assert lisa.periods == first.periods  # from period 0


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    lisa = LISA(interval=1, sampler=table)
    trainer, module = fit(lisa, build=Evaluated, fast_dev_run=3, logger=True, default_root_dir=tmp_path)
    assert trainer.global_step == len(lisa.periods) == 3
    assert not list(tmp_path.rglob("*"))
    assert trained(module) == ALL


def test_overfitting_batches() -> None:
    lisa, watch = LISA(interval=3, sampler=table), Watch()
    trainer, _ = fit(lisa, callbacks=[watch], overfit_batches=2, max_epochs=4)
    assert trainer.global_step == 8
    assert [step for _, step, _ in lisa.periods] == [0, 3, 6]
    assert watch.states == watch.trained


def test_a_trainer_that_logs_nothing_does_not_speak_of_logs() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*self.log.*")
        watch = Watch()
        lisa = LISA(interval=2, sampler=table)
        trainer = Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1, callbacks=[lisa, watch])
        trainer.fit(Silent(), loader(4))
    assert [step for _, step, _ in lisa.periods] == [0, 2]
    assert watch.states == watch.trained


class Silent(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batch)


class Iterated(Net):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return loss_of(self, batch)


def test_a_module_that_takes_its_batches_itself() -> None:
    lisa = LISA(interval=2, sampler=table)
    _, module = fit(lisa, build=Iterated)
    _, usual = fit(LISA(interval=2, sampler=table))
    for name, value in values(usual).items():
        assert torch.equal(value, module.get_parameter(name)), name


# ---- what is left behind --------------------------------------------------------------------------------------------


class HalfFrozen(Net):
    """The user froze a layer, the embedding, and a part of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].inner.requires_grad_(False)


class Raise(Callback):
    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def on_train_start(self, *_: Any) -> None:
        self._raise("start")

    def on_train_batch_start(self, *_: Any) -> None:
        self._raise("batch")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._raise("step")

    def on_fit_start(self, *_: Any) -> None:
        self._raise("fit")

    def _raise(self, here: str) -> None:
        if here == self.where:
            raise self.error


@pytest.mark.parametrize("where", ["fit", "start", "batch", "step", None])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_the_module_is_as_the_user_had_it(where: str | None, error: BaseException, warmup: int) -> None:
    module = HalfFrozen()
    free = trained(module)
    assert len(free) == len(ALL) - 1 - 3 - 2
    lisa = LISA(interval=2, sampler=lambda ask: [ask.period % 4, (ask.period + 1) % 4], warmup=warmup)
    trainer = quiet(callbacks=[lisa, Raise(where or "", error)])
    before = values(module)
    if where is None:
        trainer.fit(module, loader(8))
    else:
        with pytest.raises((ValueError, SystemExit)):
            trainer.fit(module, loader(8))
    assert trained(module) == free
    for name in ALL - free:
        assert torch.equal(before[name].double(), module.get_parameter(name)), name
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)
    lisa.on_exception(trainer, module, ValueError())  # a second time does no harm
    assert trained(module) == free


class Unpredictable(Evaluated):
    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        raise ValueError("unpredictable")


def test_what_the_user_freezes_afterwards_stays_frozen() -> None:
    lisa = LISA(interval=2, sampler=table)
    trainer, module = fit(lisa, build=Unpredictable)
    module.requires_grad_(False)
    with pytest.raises(ValueError, match="unpredictable"):
        trainer.predict(module)
    assert trained(module) == set()


def test_what_the_user_froze_is_never_trained_and_not_drawn_from() -> None:
    watch = Watch()
    lisa = LISA(num_layers=1, interval=1, sampler="cyclic")
    _, module = fit(lisa, build=HalfFrozen, callbacks=[watch])
    assert lisa.names == [f"layers.{index}" for index in (0, 2, 3, 4)]
    assert set.union(*watch.gradients) == trained(module)
    assert not set.union(*watch.states) & {"embedding.weight", "layers.1.inner.weight", "layers.2.inner.weight"}


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Net().layers)


def test_another_model_begins_anew() -> None:
    lisa = LISA(num_layers=2, interval=2, sampler="uniform")
    _, first = fit(lisa)
    once = list(lisa.periods)
    fit(lisa)  # of the same shape, with a Trainer of its own
    assert lisa.periods == once
    _, deeper = fit(lisa, build=Deeper)
    assert len(lisa.names) == 10
    assert [step for _, step, _ in lisa.periods] == [0, 2, 4, 6]
    assert trained(first) == ALL
    assert trained(deeper) > ALL


# ---- tuners ---------------------------------------------------------------------------------------------------------


def _settings(root: Path) -> dict[str, Any]:
    return {"default_root_dir": root, "callbacks": [LISA(interval=2, sampler=table)]}


def test_a_learning_rate_may_be_found_first(tmp_path: Path) -> None:
    module, trainer = Evaluated(), quiet(**_settings(tmp_path))
    found = Tuner(trainer).lr_find(module, loader(8), num_training=8)
    assert len(found.results["lr"]) >= 7
    assert trained(module) == ALL
    trainer.fit(module, loader(8))
    assert [step for _, step, _ in trainer.callbacks[0].periods] == [0, 2, 4, 6]


@pytest.mark.parametrize("first", [False, True])
def test_a_learning_rate_may_be_found_in_the_same_run(tmp_path: Path, first: bool) -> None:
    watch, lisa = Watch(), LISA(interval=2, sampler=table)
    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    order = [finder, lisa] if first else [lisa, finder]
    trainer = quiet(default_root_dir=tmp_path, callbacks=[*order, watch])
    trainer.fit(Evaluated(), loader(8))
    assert [step for _, step, _ in lisa.periods] == [0, 2, 4, 6]
    assert watch.states == watch.trained
    assert len(watch.states) == 8
    assert not os.listdir(tmp_path)
