"""LISA in processes that the Trainer starts itself, to which the callback is handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import ALL, Silent, assert_close, fit, quiet, trained, values
from tests.conformance.test_lisa_ddp import Halves
from tests.distributed.lisa import table

STRATEGIES = {
    "ddp": lambda method: DDPStrategy(start_method=method, process_group_backend="gloo"),
    "ggg": lambda method: ParoStrategy("ggg", group_size=1, start_method=method),
}


@pytest.mark.parametrize(("name", "method"), [pytest.param("ddp", "spawn", marks=pytest.mark.full), ("ggg", "fork")])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_started_run_equals_one_process(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, expected = fit(LISA(interval=2, sampler=table), build=Silent)
    torch.manual_seed(0)
    module: Any = Silent().double()  # a started process hands its weights to this very module
    lisa = LISA(interval=2, sampler=table)
    trainer = quiet(callbacks=[lisa], strategy=STRATEGIES[name](method), devices=2)
    trainer.fit(module, Halves(8, 2))
    assert_close(values(module), values(expected))
    assert trained(module) == ALL
    assert "_ddp_params_and_buffers_to_ignore" not in vars(module)
    assert trainer.callback_metrics["lisa/trainable"] == 337
