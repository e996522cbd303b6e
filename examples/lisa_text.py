"""LISA in a Trainer: a small Llama is trained whole for a while, then goes on with two layers at a time.

    python examples/lisa_text.py

Shows what LISA takes of memory before it is used, as predicted, and beside full training, as held; and where it wrote
which layers were trained when. Two minutes on two CPU cores; the text is Python's own standard library.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from byte_gpt import StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_paro.callbacks import LISA

STEPS = 200


class ByteLlama(LightningModule):
    """Llama whose tokens are bytes.

    Args:
        layers: Number of blocks.
        width: Size of the hidden state.
        lr: Learning rate.
    """

    def __init__(self, layers: int = 8, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=352,
                num_hidden_layers=layers,
                num_attention_heads=4,
                max_position_embeddings=128,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def training_step(self, text: Tensor) -> Tensor:
        return self.model(input_ids=text, labels=text).loss

    def validation_step(self, text: Tensor) -> None:
        self.log("held_out", self.training_step(text), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # all parameters, also those that LISA will freeze
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@dataclass
class Held(Callback):
    """The most that was trained and held: number of parameters, bytes of gradients and of optimizer state."""

    trained: int = 0
    gradients: int = 0
    state: int = 0

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.trained = max(self.trained, sum(p.numel() for p in module.parameters() if p.requires_grad))
        self.gradients = max(self.gradients, sum(gradient.nbytes for gradient in gradients))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        entries = trainer.optimizers[0].state.values()
        self.state = max(self.state, sum(value.nbytes for entry in entries for value in entry.values()))


def train(module: ByteLlama, *callbacks: Callback) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=STEPS,
        limit_val_batches=32,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=CSVLogger("lightning_logs", name="lisa"),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StandardLibrary())
    return trainer


def main() -> None:
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning and torch
    seed_everything(1, verbose=False)
    module, console = ByteLlama(), Console()
    console.print(LISA.memory_report(module, num_layers=2, precision="32-true", rank=8))

    full, sampled = Held(), Held()
    before = train(module, full)
    after = train(module, LISA(num_layers=2, interval=10), sampled)

    table = Table("trained", "parameters", "gradients, MB", "state, MB", "held-out loss")
    for name, held, trainer in (("all layers", full, before), ("two of eight", sampled, after)):
        loss = trainer.callback_metrics["held_out"]
        table.add_row(
            name, f"{held.trained:,}", f"{held.gradients / 1e6:.2f}", f"{held.state / 1e6:.2f}", f"{loss:.3f}"
        )
    console.print(table)
    picture = Path(after.log_dir) / "lisa.png"
    console.print(f"Which layers were trained when: {picture if picture.exists() else picture.with_suffix('.csv')}")


if __name__ == "__main__":
    main()
