"""The script that test_launch.py starts in every way a rank can be started; rank 0 writes what came out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_paro  # noqa: F401 - registers the strategies

BLOCKS, CLASSES = 3, 4
BATCH, MICRO_BATCHES, STEPS = 2, 2, 4
CLIP = 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(LightningModule):
    """A model whose parameters need no padding on up to 32 ranks: its bytes are 8 a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, CLASSES * 8, bias=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), y)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(width: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of all steps."""
    generator = torch.Generator().manual_seed(5)
    count = STEPS * MICRO_BATCHES * BATCH * ranks
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return list(zip(x, y, strict=True))


class Outcome(Callback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, module: Net) -> None:
        engine = trainer.strategy.engine
        engine.traffic.reset()
        topology = engine.topology
        self.seen["topology"] = (topology.num_groups, topology.group_size)
        self.seen["runs as"] = str(engine.partition)

    def on_train_end(self, trainer: Trainer, module: Net) -> None:
        self.seen["inter"] = trainer.strategy.engine.traffic.inter
        self.seen["intra"] = trainer.strategy.engine.traffic.intra


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="paro_iig")
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()

    outcome = Outcome()
    trainer = Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        num_nodes=options.nodes,
        devices=options.devices,
        precision="64-true",
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP,
        max_epochs=1,
        callbacks=[outcome],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net(options.width)
    trainer.fit(model, DataLoader(samples(options.width, options.nodes * options.devices), BATCH))
    if trainer.is_global_zero:
        torch.save({**outcome.seen, "steps": trainer.global_step, "weights": model.state_dict()}, options.out)


if __name__ == "__main__":
    main()
