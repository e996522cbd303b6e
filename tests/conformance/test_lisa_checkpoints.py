"""Saved anywhere, resumed anywhere: the run goes on as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Save, fit, loader, values
from tests.conformance.support import by_default
from tests.distributed.lisa import INTERVAL, TABLE, Net, batches, loss_of, table, train
from tests.distributed.pool import Pool
from tests.distributed.strategies import whole_values
from tests.distributed.test_lisa_resume import _on

STEPS = 11
POLICIES = ["drop_frozen", "reset_all", "offload", "keep"]
SAMPLERS = ["uniform", "cyclic", "weight_norm", "grad_norm"]


class Constant(Net):
    """The same batch in every step: Lightning does not fast-forward a dataloader."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0])

    def validation_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0])

    def val_dataloader(self) -> Any:
        return loader(1)


def _run(callbacks: Any = (), resume: Any = None, **options: Any) -> tuple[LISA, dict[str, Tensor]]:
    """In float32: Lightning loads a model before it makes it float64."""
    own = {"max_steps", "accumulate_grad_batches", "val_check_interval", "limit_val_batches", "first", "count"}
    settings = {"max_steps": STEPS, "limit_val_batches": 0, "count": STEPS}
    settings |= {name: value for name, value in options.items() if name in own}
    lisa = LISA(**{"interval": INTERVAL, **{name: value for name, value in options.items() if name not in own}})
    first = [*settings.pop("first", ())]
    trainer, module = fit(
        None, build=Constant, callbacks=[*first, lisa, *callbacks], resume=resume, precision="32-true", **settings
    )
    assert trainer.global_step == settings["max_steps"]
    return lisa, values(module)


def _assert_equal(whole: tuple[LISA, dict[str, Tensor]], resumed: tuple[LISA, dict[str, Tensor]]) -> None:
    assert whole[0].periods == resumed[0].periods
    assert len(whole[0].periods) == 4
    for name, value in whole[1].items():
        assert torch.equal(value, resumed[1][name]), name


# ---- where in a period ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", by_default("drop_frozen", "keep", of=POLICIES))
@pytest.mark.parametrize("sampler", by_default("uniform", "grad_norm", of=SAMPLERS))
@pytest.mark.parametrize("step", [pytest.param(INTERVAL, marks=pytest.mark.full), 2 * INTERVAL - 1, 2 * INTERVAL])
def test_at_the_boundary_of_a_period(tmp_path: Path, policy: str, sampler: str, step: int) -> None:
    """The last step of a period is made, its layers are still awake; or one step earlier."""
    options = {"state_policy": policy, "sampler": sampler}
    whole = _run([Save(tmp_path / "mid.ckpt", step)], **options)
    _assert_equal(whole, _run(resume=tmp_path / "mid.ckpt", **options))


def _boundary_on_ranks(name: str, folder: Path, policy: str) -> None:
    common = {"steps": STEPS, "accumulate": 1, "precision": "32-true", "state_policy": policy}
    path = folder / f"{policy}.ckpt"
    trainer, module, first = train(
        callbacks=[Save(path, 2 * INTERVAL)], **{**common, **_on(name), "precision": "32-true"}
    )
    whole = whole_values(module)
    trainer, module, second = train(resume=path, **{**common, **_on(name), "precision": "32-true"})
    _assert_equal((first, whole), (second, whole_values(module)))


@pytest.mark.parametrize("name", by_default("ddp", "ggg", of=["ddp", "fsdp2", "nig", "ggg"]))
@pytest.mark.parametrize("policy", ["reset_all", "offload"])
def test_at_the_boundary_on_several_ranks(pool: Pool, tmp_path: Path, name: str, policy: str) -> None:
    pool.run(_boundary_on_ranks, name, tmp_path, policy)


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("step", [INTERVAL + 1, 2 * INTERVAL])
def test_with_accumulated_gradients(tmp_path: Path, accumulate: int, step: int) -> None:
    """The first window after resuming is whole."""
    options = {"accumulate_grad_batches": accumulate, "sampler": table, "count": accumulate * STEPS}
    whole = _run([Save(tmp_path / "mid.ckpt", step)], **options)
    _assert_equal(whole, _run(resume=tmp_path / "mid.ckpt", **options))


# ---- who saves, and when --------------------------------------------------------------------------------------------


class SaveAt(Callback):
    """Save in one of the hooks, when so many steps are made."""

    def __init__(self, path: Path, hook: str, step: int) -> None:
        self.path, self.step = path, step
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


HOOKS = ["on_train_batch_start", "on_validation_start", "on_validation_epoch_end", "on_validation_end"]


@pytest.mark.parametrize("step", [INTERVAL + 1, 2 * INTERVAL])
@pytest.mark.parametrize("hook", by_default("on_train_batch_start", "on_validation_end", of=HOOKS))
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all"])
def test_in_any_hook(tmp_path: Path, hook: str, step: int, first: bool, policy: str) -> None:
    """Ahead of LISA's or behind: it may have switched already, or not."""
    options = {"val_check_interval": 1, "limit_val_batches": 1, "sampler": table, "state_policy": policy}
    save = SaveAt(tmp_path / "mid.ckpt", hook, step)
    whole = _run([] if first else [save], first=[save] if first else [], **options)
    _assert_equal(whole, _run(resume=tmp_path / "mid.ckpt", **options))


def test_the_last_of_several_checkpoints(tmp_path: Path) -> None:
    def keep() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, every_n_train_steps=4, save_last=True, save_top_k=-1, filename="{step}")

    options: dict[str, Any] = {"sampler": "uniform"}
    whole = _run([], **options)
    trainer, _ = fit(
        LISA(interval=INTERVAL, **options), build=Constant, callbacks=[keep()], enable_checkpointing=True,
        precision="32-true", max_steps=9, count=STEPS, limit_val_batches=0,
    )  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"step=4.ckpt", "step=8.ckpt", "last.ckpt"}
    for name in ("step=4.ckpt", "last.ckpt"):
        _assert_equal(whole, _run(resume=tmp_path / name, **options))


def test_a_checkpoint_holds_state_of_what_is_trained_and_plain_values_of_lisas_own(tmp_path: Path) -> None:
    lisa, _ = _run([Save(tmp_path / "mid.ckpt", INTERVAL + 1)], sampler=table, warmup=1)
    checkpoint = torch.load(tmp_path / "mid.ckpt", weights_only=True)  # refuses anything else
    names = [name for name, _ in Net().named_parameters()]
    held = {names[number] for number in checkpoint["optimizer_states"][0]["state"]}
    assert {name.rsplit(".", 2)[0] for name in held if "layers" in name} == {f"layers.{index}" for index in TABLE[1]}
    (saved,) = (state for key, state in checkpoint["callbacks"].items() if key.startswith("LISA"))
    assert (saved["active"], saved["period"], saved["steps"]) == (list(TABLE[1]), 1, INTERVAL + 1)


def test_weights_alone_begin_anew(tmp_path: Path) -> None:
    class Weights(Save):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step == self.step:
                trainer.save_checkpoint(self.path, weights_only=True)

    _run([Weights(tmp_path / "weights.ckpt", 4)], sampler="uniform")
    module = Constant()
    module.load_state_dict(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"])
    lisa = LISA(interval=INTERVAL)
    fit(lisa, module, precision="32-true", count=STEPS, limit_val_batches=0)
    assert [step for _, step, _ in lisa.periods] == [0, 3, 6, 9]


def test_a_run_that_had_no_lisa_goes_on_with_it(tmp_path: Path) -> None:
    """State of what it freezes is dropped, though it was loaded."""
    fit(None, build=Constant, callbacks=[Save(tmp_path / "full.ckpt", 4)], precision="32-true", limit_val_batches=0)
    lisa = LISA(interval=INTERVAL, sampler=table)
    trainer, module = fit(
        lisa, build=Constant, resume=tmp_path / "full.ckpt", precision="32-true", max_steps=8, limit_val_batches=0
    )
    assert lisa.periods == [(0, 0, TABLE[0]), (1, 3, TABLE[1])]
    held = {name for name, p in module.named_parameters() if p in trainer.optimizers[0].state and "layers" in name}
    assert {name.rsplit(".", 2)[0] for name in held} == {f"layers.{index}" for index in TABLE[1]}


# ---- other numbers of ranks -----------------------------------------------------------------------------------------


def _with(name: str, path: Path, save: bool) -> tuple[dict[str, Tensor], list[Any]]:
    strategy = {"one": "auto", "ddp": "ddp"}.get(name) or ParoStrategy(name, group_size=2)
    callbacks = [Save(path, INTERVAL + 1)] if save else []
    _, module, lisa = train(
        strategy, 1 if name == "one" else 4, steps=STEPS, accumulate=1, build=Constant, precision="32-true",
        callbacks=callbacks, resume=None if save else path, sampler="uniform", warmup=2,
    )  # fmt: skip
    return values(module), lisa.periods


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "nig"), ("ddp", "one"), *(pytest.param("one", name, marks=pytest.mark.full) for name in ("ggg", "ddp"))],
)
def test_on_another_number_of_ranks(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    def run(name: str, save: bool) -> tuple[dict[str, Tensor], list[Any]]:
        if name == "one":
            return _with(name, tmp_path / "mid.ckpt", save)
        return pool.run(_with, name, tmp_path / "mid.ckpt", save)[0]  # type: ignore[no-any-return]

    whole, periods = run(before, True)
    resumed, again = run(after, False)
    assert periods == again
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-5)
