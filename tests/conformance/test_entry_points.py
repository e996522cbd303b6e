"""fit, validate, test, predict, and chains of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.conformance.support import (
    COVER,
    Regressor,
    assert_close,
    assert_equal,
    by_default,
    load,
    rank,
    samples,
    trainer,
    values,
)
from tests.distributed.pool import WORLD_SIZE, Pool

STAGES = ["fit", "validate", "test", "predict", "fit again"]


def _chain(strategy: str, root: str) -> dict[str, Any]:
    """One Trainer through every entry point, with a checkpoint after each."""
    module = Regressor()
    run = trainer(strategy, root, precision="64-true")
    weights: dict[str, Any] = {}
    for stage in STAGES:
        if stage == "predict":
            run.predict(module, DataLoader(samples(12), batch_size=4 // run.world_size))
        elif stage == "fit again":
            run.fit_loop.max_epochs = 2
            run.fit(module)
        else:
            getattr(run, stage)(module)
        run.save_checkpoint(f"{root}/{strategy}-{stage}.ckpt")
        weights[stage] = values(module)
    return {"weights": weights, "metrics": {k: float(v) for k, v in run.callback_metrics.items()}}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("one")
    return root, _chain("one", str(root))


@pytest.mark.parametrize("partition", by_default("iig", "ggg"))
def test_a_chain_of_entry_points_with_a_checkpoint_after_each_equals_one_process(
    pool: Pool, tmp_path: Path, one_process: tuple[Path, dict[str, Any]], partition: str
) -> None:
    oracle_root, oracle = one_process
    results = pool.run(_chain, partition, str(tmp_path))
    for result in results:
        assert_close(result, oracle)
        assert_equal(result["weights"], results[0]["weights"])
        for stage in ["validate", "test", "predict"]:
            assert_equal(result["weights"][stage], result["weights"]["fit"])
    for stage in STAGES:
        assert_close(load(tmp_path / f"{partition}-{stage}.ckpt"), load(oracle_root / f"one-{stage}.ckpt"))


def _evaluate_only(partition: str, root: str) -> dict[str, Any]:
    module = Regressor()
    run = trainer(partition, root, precision="64-true")
    run.validate(module, verbose=False)
    run.test(module, verbose=False)
    return {k: float(v) for k, v in run.callback_metrics.items()} | {"weights": values(module)}


@pytest.mark.parametrize("partition", ["nnn", "iig", "ggg"])
def test_evaluation_without_a_fit_shows_rank_0s_model_on_every_rank(pool: Pool, tmp_path: Path, partition: str) -> None:
    oracle = _evaluate_only("one", str(tmp_path))
    for result in pool.run(_evaluate_only, partition, str(tmp_path)):
        assert result.keys() == oracle.keys()
        assert_close(result, {key: oracle[key] for key in result})


def _with_sanity_check(partition: str, root: str, steps: int) -> tuple[list[bool], dict[str, Any]]:
    stages: list[bool] = []

    class Watched(Regressor):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            stages.append(self.trainer.sanity_checking)
            super().validation_step(batch, batch_idx)

    module = Watched()
    trainer(partition, root, num_sanity_val_steps=steps, limit_val_batches=3).fit(module)
    return stages, values(module)


@pytest.mark.parametrize("partition", by_default("nnn", "iig", of=["nnn", "iig", "ggg"]))
def test_the_sanity_check_runs_and_changes_nothing(pool: Pool, tmp_path: Path, partition: str) -> None:
    with_it = pool.run(_with_sanity_check, partition, str(tmp_path), 2)
    without = pool.run(_with_sanity_check, partition, str(tmp_path), 0)
    for (stages, weights), (stages_without, weights_without) in zip(with_it, without, strict=True):
        assert stages == [True] * 2 + [False] * 3
        assert stages_without == [False] * 3
        assert_equal(weights, weights_without)


def _predict_ten(strategy: str, root: str) -> list[Any]:
    run = trainer(strategy, root, precision="64-true")
    predictions = run.predict(Regressor(), DataLoader(samples(10), batch_size=1))
    return [row.numpy() for row in predictions]


@pytest.mark.parametrize("partition", COVER)
def test_ten_samples_are_predicted_on_four_ranks_once_each(pool: Pool, tmp_path: Path, partition: str) -> None:
    expected = _predict_ten("one", str(tmp_path))
    by_rank = pool.run(_predict_ten, partition, str(tmp_path))
    assert [len(rows) for rows in by_rank] == [3, 3, 2, 2]
    for index, row in enumerate(expected):
        assert_close(by_rank[index % WORLD_SIZE][index // WORLD_SIZE], row)


class _Generator(Regressor):
    """Feeds its output back to itself, on every rank a different number of times, as generation does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        for _ in range(1 + 2 * rank() + batch_idx):
            x = torch.cat([self(x), x[:, :2]], dim=1)
        self.generated = x

    def on_validation_end(self) -> None:
        assert self.generated.isfinite().all()
        self.lengths = [*getattr(self, "lengths", []), self.generated.sum().item()]


def _generate(partition: str, root: str) -> tuple[list[float], list[float], dict[str, Any]]:
    module = _Generator()
    run = trainer(partition, root, precision="64-true", val_check_interval=2, limit_val_batches=2)
    run.fit(module)

    # the same generation by the module when nothing is sharded any more
    def again(index: int) -> Tensor:
        x = samples()[[rank() + WORLD_SIZE * i for i in (2 * index, 2 * index + 1)]][0].double()
        for _ in range(1 + 2 * rank() + index):
            x = torch.cat([module(x), x[:, :2]], dim=1)
        return x

    with torch.no_grad():
        last = again(1).sum().item()
    return module.lengths, [last], values(module)


@pytest.mark.parametrize("partition", COVER)
def test_validation_between_steps_may_run_forwards_of_different_length_on_every_rank(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    oracle = Regressor()
    trainer("one", str(tmp_path), precision="64-true").fit(oracle)
    for sums, (last,), weights in pool.run(_generate, partition, str(tmp_path)):
        assert len(sums) == 3
        assert_close(sums[-1], last)
        assert_close(weights, values(oracle))
