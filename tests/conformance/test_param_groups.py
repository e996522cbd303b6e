"""What users find in ``optimizer.param_groups``: their own parameters, and errors instead of one rank's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary

from tests.conformance.support import Regressor, assert_close, trainer, values
from tests.distributed.pool import Pool, WorkerError


class _Looking(Regressor):
    """Looks wherever Lightning hands out an optimizer."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        self.look(self.optimizers())

    def look(self, optimizer: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(one is other for one, other in zip(held, self.parameters(), strict=True))


class _Clipping(Regressor):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)


class _Saving(Regressor):
    def on_train_batch_end(self, *args: Any) -> None:
        state = self.optimizers().state_dict()
        self.optimizers().load_state_dict(state)


class _Summarised(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 5)


def _fit(strategy: str, root: str, kind: type[Regressor], **arguments: Any) -> dict[str, Any]:
    module = kind()
    trainer(strategy, root, precision="64-true", limit_val_batches=0, **arguments).fit(module)
    return values(module)


def _summarised(strategy: str, root: str) -> dict[str, Any]:
    module = _Summarised().double()
    module.example_input_array = module.example_input_array.double()
    callbacks = [ModelSummary()]
    run = trainer(strategy, root, precision="64-true", callbacks=callbacks, enable_model_summary=True)
    run.fit(module)
    return values(module)


@pytest.mark.parametrize(
    ("kind", "partition"),
    [(_Looking, "nig"), (_Looking, "iig"), (_Clipping, "nnn"), (_Saving, "nnn")],
)
def test_param_groups_hold_the_parameters_of_the_module(
    pool: Pool, tmp_path: Path, kind: type[Regressor], partition: str
) -> None:
    expected = _fit("one", str(tmp_path), kind)
    for result in pool.run(_fit, partition, str(tmp_path), kind):
        assert_close(result, expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Clipping, "lies in shards over the ranks.*HINT: `trainer.strategy.grad_norm\\(\\)`"),
        (_Saving, "AdamW.state_dict\\(\\) was called, but this rank holds only shards.*HINT: .*save_checkpoint"),
    ],
)
@pytest.mark.parametrize("partition", ["nng", "iig"])
def test_one_ranks_numbers_are_refused(
    pool: Pool, tmp_path: Path, kind: type[Regressor], message: str, partition: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.run(_fit, partition, str(tmp_path), kind)


def test_a_summary_that_runs_the_model_sees_its_parameters(pool: Pool, tmp_path: Path) -> None:
    expected = _summarised("one", str(tmp_path))
    for result in pool.run(_summarised, "iig", str(tmp_path)):
        assert_close(result, expected)
