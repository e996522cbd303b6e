"""LISA beside Lightning's other loops: evaluation, short runs, batches that the module takes itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import ALL, Silent, Watch, fit, loader, quiet, trained, values
from tests.distributed.lisa import Net, loss_of, table


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
