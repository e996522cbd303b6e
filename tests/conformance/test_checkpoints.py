"""A checkpoint is an ordinary Lightning .ckpt: any strategy writes the same one and continues from any other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paro import ParoStrategy
from tests.conformance.support import (
    COVER,
    SPREAD,
    Regressor,
    assert_close,
    assert_equal,
    load,
    rank,
    samples,
    trainer,
    values,
)
from tests.distributed.pool import Pool

OPTIMIZERS = ["adamw", "sgd", "adagrad"]
PAIRS = [  # every partition and every optimizer; the other combinations in the full run
    pytest.param(partition, optimizer, marks=() if number % 3 == other else pytest.mark.full)
    for number, partition in enumerate(SPREAD)
    for other, optimizer in enumerate(OPTIMIZERS)
]


def _fit(
    strategy: Any, root: str, optimizer: str, epochs: int, *, resume: str | None = None, save: str | None = None
) -> dict[str, Any]:
    """Train to the end of an epoch, from fresh values or from a checkpoint that must overrule them."""
    module = Regressor(optimizer, seed=0 if resume is None else 1).double()  # before Lightning loads values into it
    run = trainer(strategy, root, precision="64-true", max_epochs=epochs)
    run.fit(module, ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return values(module)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, by optimizer: two epochs uninterrupted, and a checkpoint after the first."""
    root = str(tmp_path_factory.mktemp("oracle"))
    found: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        path = f"{root}/{optimizer}.ckpt"
        _fit("one", root, optimizer, 1, save=path)
        found[optimizer] = (path, _fit("one", root, optimizer, 2))
    return found


@pytest.mark.parametrize(("partition", "optimizer"), PAIRS)
def test_one_process_and_ddp_continue_from_its_checkpoint(
    pool: Pool, tmp_path: Path, oracle: dict[str, Any], partition: str, optimizer: str
) -> None:
    path, root = str(tmp_path / "saved.ckpt"), str(tmp_path)
    pool.run(_fit, partition, root, optimizer, 1, save=path)
    assert_close(load(path), load(oracle[optimizer][0]))
    assert_close(_fit("one", root, optimizer, 2, resume=path), oracle[optimizer][1])
    for weights in pool.run(_fit, "ddp", root, optimizer, 2, resume=path):
        assert_close(weights, oracle[optimizer][1])


@pytest.mark.parametrize(("partition", "optimizer"), PAIRS)
def test_it_continues_from_the_checkpoint_of_one_process(
    pool: Pool, tmp_path: Path, oracle: dict[str, Any], partition: str, optimizer: str
) -> None:
    for weights in pool.run(_fit, partition, str(tmp_path), optimizer, 2, resume=oracle[optimizer][0]):
        assert_close(weights, oracle[optimizer][1])


def test_it_writes_what_ddp_writes_and_continues_from_it(pool: Pool, tmp_path: Path, oracle: dict[str, Any]) -> None:
    ddp, paro = str(tmp_path / "ddp.ckpt"), str(tmp_path / "paro.ckpt")
    pool.run(_fit, "ddp", str(tmp_path), "adamw", 1, save=ddp)
    pool.run(_fit, "iig", str(tmp_path), "adamw", 1, save=paro)
    assert_close(load(paro), load(ddp))
    for weights in pool.run(_fit, "iig", str(tmp_path), "adamw", 2, resume=ddp):
        assert_close(weights, oracle["adamw"][1])


def _fit_in_groups(partition: str, group_size: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return _fit(ParoStrategy(partition, group_size=group_size), *args, **kwargs)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("iig", 2), ("ggg", 4)),
        (("ggg", 2), ("nnn", 1)),
        pytest.param(("nig", 1), ("igg", 2), marks=pytest.mark.full),
        (("igg", 2), ("nni", 4)),
        pytest.param(("gig", 2), ("iii", 1), marks=pytest.mark.full),
    ],
    ids=lambda side: f"{side[0]}-groups-of-{side[1]}",
)
def test_the_partition_and_the_groups_may_change_between_runs(
    pool: Pool, tmp_path: Path, oracle: dict[str, Any], saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    path, root = str(tmp_path / "saved.ckpt"), str(tmp_path)
    pool.run(_fit_in_groups, *saved, root, "adamw", 1, save=path)
    for weights in pool.run(_fit_in_groups, *loaded, root, "adamw", 2, resume=path):
        assert_close(weights, oracle["adamw"][1])


class _ByStep(Regressor):
    """Its data follow from the global step, so that a run can be resumed in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.trainer.global_rank)
        chosen = torch.randint(0, 48, (4,), generator=generator)
        return self.loss(samples()[chosen])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _resumed_and_uninterrupted(partition: str, root: str) -> tuple[Any, Any]:
    """What this rank and a checkpoint hold after five steps; the second run was resumed in the middle of the epoch."""
    ends = []
    for resume in (None, f"{root}/step=3.ckpt"):
        module = _ByStep(seed=0 if resume is None else 1)
        keep = ModelCheckpoint(root, "{step}", every_n_train_steps=3, save_top_k=-1)
        arguments = {"enable_checkpointing": True, "callbacks": [keep] if resume is None else []}
        run = trainer(partition, root, max_steps=5, gradient_clip_val=0.5, limit_val_batches=0, **arguments)
        run.fit(module, ckpt_path=resume)
        assert run.global_step == 5
        path = f"{root}/end-{resume is None}.ckpt"
        run.save_checkpoint(path)
        end = load(path) if rank() == 0 else {"optimizer_states": [], "lr_schedulers": []}
        ends.append([values(module), end["optimizer_states"], end["lr_schedulers"]])
    return ends[0], ends[1]


def _in_float32(partition: str, root: str) -> bool:
    uninterrupted, resumed = _resumed_and_uninterrupted(partition, root)
    assert_equal(resumed, uninterrupted)
    return all(value.dtype == "float32" for value in uninterrupted[0].values())


@pytest.mark.parametrize("partition", COVER)
def test_resumed_training_equals_uninterrupted_training_bit_for_bit_in_float32(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    assert pool.run(_in_float32, partition, str(tmp_path)) == [True] * 4


def _best_and_last(strategy: str, root: str) -> dict[str, Any]:
    """Fit with a monitored ModelCheckpoint, then test its best checkpoint."""
    module = Regressor()
    keep = ModelCheckpoint(f"{root}/{strategy}", "{epoch}", monitor="val_loss", save_last=True, save_top_k=2)
    run = trainer(strategy, root, precision="64-true", max_epochs=3, enable_checkpointing=True, callbacks=[keep])
    run.fit(module)
    best = run.test(module, ckpt_path="best", verbose=False)[0]
    last = run.test(module, ckpt_path="last", verbose=False)[0]
    state = keep.state_dict()
    kept = {Path(path).name: float(score) for path, score in state["best_k_models"].items()}
    return {"best": best, "last": last, "kept": kept, "score": float(state["best_model_score"])}


@pytest.mark.parametrize("partition", ["nig", "ggg"])
def test_model_checkpoint_keeps_and_finds_what_it_does_in_one_process(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    expected = _best_and_last("one", str(tmp_path))
    for result in pool.run(_best_and_last, partition, str(tmp_path)):
        result["kept"], kept = dict(sorted(result["kept"].items())), dict(sorted(expected["kept"].items()))
        assert_close(result, {**expected, "kept": kept})
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert {path.name for path in (tmp_path / partition).iterdir()} == names
    for name in names:
        ours, theirs = load(tmp_path / partition / name), load(tmp_path / "one" / name)
        paths = ours.pop("callbacks"), theirs.pop("callbacks")
        assert paths[0].keys() == paths[1].keys()
        assert_close(ours, theirs)


def test_a_checkpoint_holds_plain_tensors_and_is_no_larger_than_that_of_one_process(
    pool: Pool, tmp_path: Path, oracle: dict[str, Any]
) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(_fit, "iig", str(tmp_path), "adamw", 1, save=str(path))
    saved = torch.load(path, weights_only=True)
    tensors = [
        *saved["state_dict"].values(),
        *(v for s in saved["optimizer_states"][0]["state"].values() for v in s.values()),
    ]
    assert {type(tensor) for tensor in tensors} == {torch.Tensor}
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert path.stat().st_size < 1.1 * Path(oracle["adamw"][0]).stat().st_size


class _Renamed(Regressor):
    """Saves its net under another name and without the last bias, as custom state_dict overrides do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        own = super().state_dict(*args, **kwargs)
        return {f"renamed.{name}": value for name, value in own.items() if name != "net.outlet.bias"}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        own = {name.removeprefix("renamed."): value for name, value in state.items()}
        return super().load_state_dict(own, strict=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"steps": self.trainer.global_step}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def _own_values(module: _Renamed) -> dict[str, Any]:
    return {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def _save_renamed(partition: str, root: str) -> dict[str, Any]:
    module = _Renamed()
    run = trainer(partition, root)
    run.fit(module)
    run.save_checkpoint(f"{root}/renamed.ckpt")
    return _own_values(module)


def _load_renamed(partition: str, root: str) -> tuple[dict[str, int], dict[str, Any]]:
    module = _Renamed(seed=3)
    trainer(partition, root, max_epochs=2, limit_train_batches=0).validate(module, ckpt_path=f"{root}/renamed.ckpt")
    return module.note, _own_values(module)


@pytest.mark.parametrize("partition", ["nnn", "iig", "ggg"])
def test_custom_state_dicts_and_checkpoint_hooks_survive(pool: Pool, tmp_path: Path, partition: str) -> None:
    trained = pool.run(_save_renamed, partition, str(tmp_path))[0]
    saved = load(tmp_path / "renamed.ckpt")
    assert saved["note"] == {"steps": 6}
    assert sorted(saved["state_dict"]) == sorted(f"renamed.{name}" for name in trained if name != "net.outlet.bias")
    for note, weights in pool.run(_load_renamed, partition, str(tmp_path)):
        assert note == {"steps": 6}
        del weights["net.outlet.bias"]
        assert_equal(weights, {name: value for name, value in trained.items() if name != "net.outlet.bias"})
