"""Saved in the middle of a period and resumed: not one bit differs from the run that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.distributed.lisa import INTERVAL, Net, batches, train
from tests.distributed.pool import Pool
from tests.distributed.strategies import whole_values
from tests.distributed.test_lisa import Sharded, _strategy

STEPS, SAVED = 3 * INTERVAL + 2, INTERVAL + 1
CASES = [
    {"state_policy": "drop_frozen", "sampler": "uniform"},
    {"state_policy": "reset_all", "sampler": "cyclic"},
    {"state_policy": "offload", "sampler": "weight_norm"},
    {"state_policy": "keep", "sampler": "grad_norm", "keep_master": True},
    {"warmup": 2, "train_head": "sampled", "train_embeddings": "never"},
]


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


class Constant(Net):
    """The same batch in every step: Lightning does not fast-forward a dataloader."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            Sharded.configure_model(self)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batches(1)[0].to(batch.device), index)


def both_ways(path: Path, name: str = "", **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], LISA, LISA]:
    """Parameters after a run, and after one that was resumed in it."""
    common = {"steps": STEPS, "accumulate": 1, "build": Constant, "precision": "32-true", **options}
    trainer, module, straight = train(callbacks=[Save(path)], **{**common, **_on(name)})
    whole = whole_values(module)
    trainer, module, resumed = train(resume=path, **{**common, **_on(name)})
    return whole, whole_values(module), straight, resumed


def _on(name: str) -> dict[str, Any]:
    """A new strategy, for four ranks if it is one of those."""
    return {**_strategy(name), "devices": 4, "build": Constant} if name else {}


def assert_equal(whole: dict[str, Tensor], resumed: dict[str, Tensor], one: LISA, other: LISA) -> None:
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    assert one.periods == other.periods
    assert len(one.periods) == 4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_device(tmp_path: Path, case: dict[str, Any]) -> None:
    assert_equal(*both_ways(tmp_path / "mid.ckpt", **case))


def _on_ranks(name: str, folder: Path, cases: list[dict[str, Any]]) -> None:
    for number, case in enumerate(cases):
        assert_equal(*both_ways(folder / f"{number}.ckpt", name, **case))


@pytest.mark.parametrize(
    "name", ["ddp", "fsdp2", "ggg", *(pytest.param(name, marks=pytest.mark.full) for name in ("nig", "iig"))]
)
def test_several_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    pool.run(_on_ranks, name, tmp_path, CASES[2:4])


def _elsewhere(path: Path, name: str) -> dict[str, Tensor]:
    options = {
        "steps": STEPS,
        "accumulate": 1,
        "build": Constant,
        "sampler": "uniform",
        "state_policy": "offload",
        "precision": "32-true",
    }
    trainer, module, _ = train(resume=path, **{**options, **_on(name)})
    return whole_values(module)


def test_a_checkpoint_of_shards_goes_on_in_one_process(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "0.ckpt"
    pool.run(_on_ranks, "iig", tmp_path, [{"state_policy": "offload", "sampler": "uniform"}])
    there = pool.run(_elsewhere, path, "iig")[0]
    for name, value in _elsewhere(path, "").items():
        torch.testing.assert_close(value, there[name], rtol=0, atol=1e-6)


def test_another_models_layers_are_refused(tmp_path: Path) -> None:
    class Renamed(Constant):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = next(value for key, value in checkpoint["callbacks"].items() if key.startswith("LISA"))
            state["names"] = [f"model.{name}" for name in state["names"]]

    train(callbacks=[Save(tmp_path / "mid.ckpt")], steps=STEPS, accumulate=1, build=Constant)
    with pytest.raises(ValueError, match=r"drew from 5 layers, 'model.layers.0' to 'model.layers.4'; this model has 5"):
        train(resume=tmp_path / "mid.ckpt", steps=STEPS, accumulate=1, build=Renamed)


def test_other_settings_draw_anew(tmp_path: Path) -> None:
    train(callbacks=[Save(tmp_path / "mid.ckpt")], steps=STEPS, accumulate=1, build=Constant, sampler="uniform")
    _, _, lisa = train(
        resume=tmp_path / "mid.ckpt", steps=STEPS, accumulate=1, build=Constant, num_layers=3, sampler="uniform"
    )
    assert [len(active) for _, _, active in lisa.periods] == [2, 2, 3, 3, 3]


def test_a_second_fit_goes_on(tmp_path: Path) -> None:
    """Of the same callback, where it was."""
    trainer, module, lisa = train(steps=4, accumulate=1, build=Constant, sampler="uniform")
    before = list(lisa.periods)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 5, 8
    trainer.fit(module, torch.utils.data.DataLoader(batches(8), batch_size=None))
    assert lisa.periods[: len(before)] == before
    assert len(lisa.periods) == 3
    assert isinstance(module, LightningModule)
