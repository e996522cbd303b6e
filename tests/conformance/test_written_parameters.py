"""Parameters that the user's own code writes to: in place, through ``data``, or by loading in the middle of a run."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_paro.strategies._live import engine_of, forget, keep
from tests.conformance.support import Regressor, assert_close, load, trainer, values
from tests.distributed.pool import Pool


class Normalised(Regressor):
    """The prototypes of SwAV are normalised in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            weight = self.net.outlet.weight
            weight.copy_(nn.functional.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)


class Assigned(Regressor):
    """A block gives one of its weights other data in forward, as max-norm constraints are often written."""

    def __init__(self) -> None:
        super().__init__()
        up = self.net.blocks[0].up

        def renormalise(module: nn.Module, args: Any) -> None:
            up.weight.data = torch.renorm(up.weight.data, p=2, dim=0, maxnorm=0.5)

        self.net.blocks[0].norm.register_forward_pre_hook(renormalise)


class Clamped(Regressor):
    """The critic of a WGAN after each step. Kept where a parameter is never released."""

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class StartedAnew(Regressor):
    def on_train_start(self) -> None:
        self.net.outlet.weight.data.zero_()
        self.net.inlet.weight.data = torch.full_like(self.net.inlet.weight.data, 0.1)


def _fit(strategy: str, root: str, kind: type[Regressor], precision: str) -> dict[str, Any]:
    module = kind()
    module.kind = "sgd"  # Adam makes a whole step of rounding noise
    run = trainer(strategy, root, precision=precision, max_epochs=2, limit_val_batches=0)
    run.fit(module)
    run.save_checkpoint(f"{root}/{strategy}.ckpt")
    return values(module)


@pytest.mark.parametrize(
    ("precision", "kind", "partition"),
    [  # by default every kind in every precision, and every kind with every partition
        pytest.param(precision, kind, name, marks=() if (number + other) % 2 else pytest.mark.full)
        for kinds, names in (((Normalised, Assigned), ("nng", "iig", "ggg")), ((Clamped, StartedAnew), ("nnn", "nig")))
        for number, (kind, name) in enumerate(product(kinds, names))
        for other, precision in enumerate(["64-true", "bf16-mixed"])
    ],
)
def test_what_is_written_in_place_is_kept_as_in_one_process(
    pool: Pool, tmp_path: Path, kind: type[Regressor], partition: str, precision: str
) -> None:
    expected = _fit("one", str(tmp_path), kind, precision)
    tolerance = 1e-9 if precision == "64-true" else 5e-2
    for result in pool.run(_fit, partition, str(tmp_path), kind, precision):
        assert_close(result, expected, tolerance)
    if kind is Clamped:
        assert max(abs(value).max() for value in result.values()) <= 0.0502, "the last clamp is in the weights, too"
        saved = load(tmp_path / f"{partition}.ckpt")["state_dict"]
        assert max(value.abs().max() for value in saved.values()) <= 0.0502


class _Tuned(Regressor):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _find_rate(strategy: str, root: str, precision: str) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    module = _Tuned().to(torch.float64 if precision == "64-true" else torch.float32)
    before = values(module)
    run = trainer(strategy, root, precision=precision, max_epochs=3, limit_val_batches=0)
    found = Tuner(run).lr_find(module, num_training=10, min_lr=1e-3, max_lr=1.0, early_stop_threshold=None)
    return before, values(module), found.results["loss"]


@pytest.mark.parametrize(
    ("partition", "precision"),
    [
        ("nng", "64-true"),
        ("iig", "bf16-mixed"),
        pytest.param("nng", "bf16-mixed", marks=pytest.mark.full),
        pytest.param("iig", "64-true", marks=pytest.mark.full),
    ],
)
def test_the_search_for_a_learning_rate_puts_the_weights_back(
    pool: Pool, tmp_path: Path, partition: str, precision: str
) -> None:
    results = pool.run(_find_rate, partition, str(tmp_path), precision)
    for _, after, losses in results:
        assert abs(losses[-1] - losses[0]) > 0.1, "it did train"
        assert_close(after, results[0][0], 1e-12)  # rank 0's first values, everywhere


class _Failing(Regressor):
    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 2:
            raise ValueError("on every rank")
        return super().training_step(batch, batch_idx)


def _loaded_after_a_failure(strategy: str, root: str) -> dict[str, Any]:
    saved = _fit(strategy, root, Regressor, "64-true")
    module = _Failing("sgd")
    with pytest.raises(ValueError, match="on every rank"):
        trainer(strategy, root, precision="64-true").fit(module)
    module.fails = False
    trainer(strategy, root, precision="64-true", max_epochs=2).fit(module, ckpt_path=f"{root}/{strategy}.ckpt")
    assert_close(values(module), saved)
    return saved


@pytest.mark.parametrize("partition", ["nng", "iig"])
def test_a_checkpoint_is_loaded_into_a_module_whose_last_run_failed(pool: Pool, tmp_path: Path, partition: str) -> None:
    pool.run(_loaded_after_a_failure, partition, str(tmp_path))


def _left_of_failed_runs(strategy: str, root: str) -> int:
    """Modules that are still there after their runs have failed, and nobody knows them any more."""
    left = []
    for _ in range(2):
        module = _Failing("sgd")
        with pytest.raises(ValueError, match="on every rank"):
            trainer(strategy, root, precision="64-true").fit(module)
        left.append(weakref.ref(module))
        del module
    gc.collect()
    return sum(reference() is not None for reference in left)


@pytest.mark.parametrize("partition", ["nng", "iig"])
def test_a_module_whose_run_failed_is_freed(pool: Pool, tmp_path: Path, partition: str) -> None:
    assert pool.run(_left_of_failed_runs, partition, str(tmp_path)) == [0] * 4


def test_a_copy_of_a_sharded_module_is_not_known_to_be_sharded() -> None:
    module, engine = Regressor("sgd"), mock.Mock()
    engine.module = module
    keep(module, engine)
    assert engine_of(module) is engine
    assert engine_of(copy.copy(module)) is engine_of(copy.deepcopy(module)) is None
    assert forget(module) is engine
    assert engine_of(module) is forget(module) is None
