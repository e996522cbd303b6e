"""Fine-tuning under a Lightning Trainer, as every arm does it: bf16-true, fused AdamW with moments in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.lab.lisa_arms import SHAPES, Arm, callback
from benchmarks.lab.models import loss_of

__all__ = ["ends", "train"]

LR = 1e-4


class _Module(LightningModule):
    def __init__(self, model: Any, mark: Callable[[], None]) -> None:
        super().__init__()
        self.model, self._mark = model, mark

    def training_step(self, batch: Tensor) -> Tensor:
        self._mark()
        loss = loss_of(self.model, batch)
        self._mark()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=LR, fused=True)


def train(
    model: Any,
    shape: str,
    arm: Arm,
    interval: int,
    steps: int,
    watch: Callback,
    device: torch.device,
    batch: int = 1,
    mark: Callable[[], None] = lambda: None,
) -> None:
    """Train for some optimizer steps on one batch of random tokens, so that the loss falls.

    Args:
        model: What requires gradients now is trained.
        shape: Its name.
        arm: Whose callback takes part.
        interval: Optimizer steps of a period of LISA.
        steps: How many.
        watch: A callback that comes after LISA.
        device: Where the model is.
        batch: Number of sequences.
        mark: Called when a forward begins and when it ends.
    """
    vocab, length = SHAPES[shape].config["vocab_size"], SHAPES[shape].length
    tokens = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    trainer = Trainer(
        strategy="auto", accelerator="gpu" if device.type == "cuda" else "cpu", devices=1, precision="bf16-true",
        max_steps=steps, callbacks=[*callback(arm, interval), watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(_Module(model, mark), DataLoader([tokens] * steps, batch_size=None))


def ends(losses: Iterable[Tensor]) -> dict[str, float]:
    """The first and the last loss of a training, as they stand in a row.

    Raises:
        ValueError: If one of them all is not finite; then nothing was trained that is worth a measurement.
    """
    values = [float(loss) for loss in losses]
    if not all(map(math.isfinite, values)):
        raise ValueError(f"the loss went from {values[0]} to {values[-1]}; expected finite ones all along.")
    return {"first_loss": values[0], "loss": values[-1]}
