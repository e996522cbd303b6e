"""Processes that a notebook or a test starts itself, instead of running the script again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lightning_paro import ParoStrategy
from tests.conformance.support import Regressor, assert_close, trainer, values


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_started_run_hands_weights_and_metrics_back(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # Lightning then leaves the threads alone
    large = torch.rand(500, 500)
    torch.mm(large, large).sum()  # in this process there are OpenMP threads, which a fork loses
    before = dict(os.environ)
    oracle = Regressor()
    single = trainer("one", str(tmp_path), precision="64-true", limit_train_batches=3)
    single.fit(oracle)

    module = Regressor().double()  # before Lightning loads the weights of the processes into it
    strategy = ParoStrategy("iig", start_method=method)
    run = trainer(strategy, str(tmp_path), precision="64-true", limit_train_batches=3, devices=2)
    run.fit(module)
    assert_close(values(module), values(oracle))
    assert_close(float(run.callback_metrics["val_loss"]), float(single.callback_metrics["val_loss"]), 1e-6)
    if method == "fork":  # again with the same Trainer: what the first run left behind must do no harm
        (metrics,) = run.validate(module, verbose=False)
        assert_close(metrics["val_loss"], float(single.callback_metrics["val_loss"]), 1e-6)
    assert {name: value for name, value in os.environ.items() if name in before} == before
