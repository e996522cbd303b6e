"""``Trainer(sync_batchnorm=True)``: statistics over all ranks, as in one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paro import ParoStrategy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        trainer = self.trainer
        return DataLoader(rows[trainer.global_rank :: trainer.world_size], batch_size=8 // trainer.world_size)


def _fit(strategy: Any, devices: int) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)
    module = Net().double()  # a started process hands its weights to this very module
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="gpu", precision="64-true", sync_batchnorm=True, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    return {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("partition", ["nnn", "nig", "iii", "ggg"])
def test_sync_batchnorm_equals_one_process_on_the_whole_batch(partition: str) -> None:
    expected = _fit("auto", 1)
    here = _fit(ParoStrategy(partition, start_method="spawn"), 2)
    assert here.keys() == expected.keys()
    for name, truth in expected.items():
        torch.testing.assert_close(here[name], truth, rtol=0, atol=1e-10 * max(truth.abs().max().item(), 1), msg=name)
