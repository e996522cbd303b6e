"""A run with LISA leaves the module as the user had it, however it ends, and the callback ready for another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_paro.algorithms.sampling import Draw
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import ALL, Silent, Watch, fit, loader, quiet, trained, values
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


# ---- one after another ----------------------------------------------------------------------------------------------


def test_a_tuner_does_not_bring_an_earlier_run_back() -> None:
    """A tuner saves and loads a checkpoint before LISA looks at the model."""

    class Tuned(Silent):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.1

    used, fresh = LISA(interval=2, sampler=table), LISA(interval=2, sampler=table)
    fit(used, count=7)
    results = []
    for lisa in (used, fresh):
        finder = LearningRateFinder(num_training_steps=4, update_attr=False)
        results.append(values(fit(lisa, build=Tuned, callbacks=[finder])[1]))
    assert used.periods == fresh.periods == [(number, 2 * number, table_of(number)) for number in range(4)]
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def table_of(number: int) -> tuple[int, ...]:
    return tuple(sorted(table(Draw(number, 5, 2, 0))))


def test_what_is_frozen_after_a_run_that_did_not_begin_stays_frozen() -> None:
    lisa, module = LISA(interval=2, sampler=table), Evaluated()
    trainer, _ = fit(lisa, module, max_steps=0)
    module.embedding.requires_grad_(False)

    class Fails(Callback):
        def on_validation_start(self, *_: Any) -> None:
            raise ValueError("no")

    trainer.callbacks.append(Fails())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no"):
        trainer.validate(module, loader(1))
    assert not module.embedding.weight.requires_grad


class FrozenLate(Silent):
    def on_fit_start(self) -> None:
        self.layers[1].requires_grad_(False)


def test_what_is_frozen_too_late_is_not_trained_in_silence() -> None:
    with pytest.raises(
        ValueError, match="'layers.1.inner.weight' and 2 more was frozen after LISA .* HINT: freeze it in"
    ):
        fit(LISA(interval=2, sampler=table), FrozenLate())


def test_a_table_that_cannot_be_written_costs_no_checkpoint(tmp_path: Path) -> None:
    class Blocks(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            path = Path(trainer.log_dir) / "lisa.csv"
            path.unlink()
            path.mkdir()

    last = ModelCheckpoint(tmp_path / "kept", save_last=True, save_on_train_epoch_end=False)
    with pytest.warns(UserWarning, match=r"LISA could not write .*lisa.csv: IsADirectoryError.* Training goes on"):
        fit(
            LISA(interval=2, sampler=table), logger=CSVLogger(tmp_path), enable_checkpointing=True,
            callbacks=[Blocks(), last],
        )  # fmt: skip
    assert (tmp_path / "kept" / "last.ckpt").is_file()


def test_a_remote_folder() -> None:
    trainer, _ = fit(LISA(interval=2, sampler=table), logger=CSVLogger("memory://logs"))
    assert get_filesystem("memory://logs").isfile(f"{trainer.log_dir}/lisa.csv")
    assert not Path("memory:").exists()


class PastLightning(Silent):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        optimizer.optimizer.step()


def test_steps_that_lightning_does_not_see_are_refused() -> None:
    with pytest.raises(RuntimeError, match="has made 1 steps, of which Lightning, and so LISA, has seen 0. HINT: "):
        fit(LISA(interval=2, sampler=table), PastLightning())


def test_a_way_of_ones_own_to_clear_gradients_is_used() -> None:
    class Keeps(Silent):
        def optimizer_zero_grad(self, *_: Any) -> None:
            pass

    with_lisa, without = (values(fit(lisa, build=Keeps)[1]) for lisa in (LISA(num_layers=5, interval=2), None))
    assert all(torch.equal(value, without[name]) for name, value in with_lisa.items())
