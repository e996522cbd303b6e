"""A run with LISA leaves the module as the user had it, however it ends, and the callback ready for another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import ALL, Watch, fit, loader, quiet, trained, values
from tests.conformance.test_lisa_loops import Evaluated
from tests.distributed.lisa import Net, table


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
@pytest.mark.parametrize("warmup", [pytest.param(0, marks=pytest.mark.full), 1])
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
