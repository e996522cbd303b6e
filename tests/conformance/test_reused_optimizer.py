"""An optimizer object that outlives a fit: it is the user's own again, and the next fit goes on with its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paro import ParoStrategy
from tests.distributed.pool import Pool, WorkerError


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer

    def train_dataloader(self) -> Any:
        rows = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        trainer = self.trainer
        return DataLoader(rows[trainer.global_rank :: trainer.world_size], batch_size=8 // trainer.world_size)


def _fit_twice(strategies: list[Any], devices: int) -> list[Tensor]:
    seed_everything(0, verbose=False)
    module = Net()
    for strategy in strategies:
        Trainer(
            strategy=strategy if devices == 1 else ParoStrategy(strategy, group_size=2), devices=devices,
            accelerator="cpu", precision="64-true", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        ).fit(module)  # fmt: skip
        held = [p for group in module.optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("partition", ["nnn", "nig", "iig", "ggg"])
def test_the_second_fit_goes_on_with_the_state_of_the_first(pool: Pool, partition: str) -> None:
    expected = _fit_twice(["auto", "auto"], 1)
    for parameters in pool.run(_fit_twice, [partition, partition], 4):
        for value, truth in zip(parameters, expected, strict=True):
            torch.testing.assert_close(value, truth, rtol=0, atol=1e-10)


def test_another_partition_is_refused_rather_than_fed_with_foreign_state(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="from a run with another partition or topology"):
        pool.run(_fit_twice, ["ggg", "iii"], 4)
