"""Ranks that fall out of step in training are told so, with the numbers, instead of hanging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_paro import ParoStrategy
from tests.distributed.pool import Pool, WorkerError
from tests.interpreter import Python


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(torch.ones(self.rows, 4))


def _fit(streams: bool, uneven: bool, limit: int | None = None) -> int:
    rows = 6 + 2 * (torch.distributed.get_rank() == 2) if uneven else 6
    trainer = Trainer(
        strategy=ParoStrategy("iig", group_size=2), devices=4, accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, limit_train_batches=limit,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(Stream(rows) if streams else torch.ones(rows, 4), batch_size=2))
    return trainer.global_step


def test_loaders_of_different_lengths_stop_all_ranks_before_the_first_step(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit, streams=False, uneven=True)
    for message in caught.value.messages():
        assert message is not None
        assert "ValueError: the ranks have different numbers of training batches" in message
        assert "rank 0: 3, rank 1: 3, rank 2: 4, rank 3: 3" in message


def test_streams_that_end_at_different_steps_stop_all_ranks(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit, streams=True, uneven=True)
    for message in caught.value.messages():
        assert message is not None
        assert "rank 0: 3, rank 1: 3, rank 2: more than 3, rank 3: 3" in message


@pytest.mark.parametrize("streams", [False, True])
def test_even_loaders_and_those_made_even_by_a_limit_train(pool: Pool, streams: bool) -> None:
    assert pool.run(_fit, streams=streams, uneven=False) == [6] * 4
    assert pool.run(_fit, streams=streams, uneven=True, limit=2) == [4] * 4


DEADLOCK = """
import datetime
import sys
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_paro import ParoStrategy, state_access

class OnRankZero(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero and index == 2:
            if sys.argv[1] == "parameters":
                with state_access(trainer).full_parameters(module):
                    pass
            if sys.argv[1] == "norm":
                trainer.strategy.grad_norm()

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def training_step(self, batch, index):
        for number, block in enumerate(self.blocks):
            if not (sys.argv[1] == "block" and index == 2 and number == 2 and self.global_rank == 1):
                batch = block(batch)
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    strategy = ParoStrategy("iii", timeout=datetime.timedelta(seconds=18), start_method="fork")
    Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[OnRankZero()],
    ).fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("how", "places"),
    [
        pytest.param(
            "block",
            ("gathering unit", "comparing the units that run"),
            marks=pytest.mark.full,
        ),
        ("parameters", ("entering full_parameters", "skip.py:12", "gathering unit")),
        pytest.param("norm", ("the norm of the gradient", "skip.py:15", "gathering unit"), marks=pytest.mark.full),
    ],
)
def test_ranks_that_wait_in_different_places_end_and_say_where(
    tmp_path: Path, how: str, places: tuple[str, ...]
) -> None:
    script = tmp_path / "skip.py"
    script.write_text(DEADLOCK)
    run = Python([str(script), how], log := tmp_path / "log")
    try:
        assert run.wait(170) != 0
    finally:
        run.kill()
    said = log.read_text()
    assert "all ranks have been waiting for more than 6 s, in different collectives" in said
    for place in ("rank 0: ", "rank 1: ", "HINT: every rank must make the same collective calls", *places):
        assert place in said
