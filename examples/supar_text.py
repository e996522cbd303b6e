"""A model made wider and sparser, by the rules of SμPar and by the standard ones: what becomes of its activations.

    python examples/supar_text.py

Prints the plan of a GPT-2 of bytes, then trains ten steps at several densities and compares activations with the dense
model's, and trains the sparsest for a while. A minute on two CPU cores; the text is Python's own standard library.
"""

from __future__ import annotations

import warnings

import torch
from byte_gpt import StandardLibrary
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.callbacks import SparsityReport
from lightning_paro.experiments import Setting, coord_check
from lightning_paro.mixins import SuParMixin

BASE, WIDE, DENSITIES = 64, 256, (1, 1 / 4, 1 / 16)
BLOCKS = ["model.transformer.h.0.mlp", "model.transformer.h.1.mlp", "model.transformer.h.1"]


class ByteGPT(SuParMixin, LightningModule):
    """A GPT-2 whose tokens are bytes; its plan says what width and density change.

    Args:
        setting: Of which parameterization, width, density and seed.
        lr: Learning rate of the base model.
    """

    def __init__(self, setting: Setting, lr: float = 4e-3) -> None:
        super().__init__()
        self.lr = lr
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=128,
                n_embd=setting.width,
                n_layer=2,
                n_head=setting.width // 32,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        plan = {"density": setting.density, "parameterization": setting.parameterization, "seed": setting.seed}
        self.supar_setup(SuParPlan.from_model(self, base_width=BASE, init_std=0.08, **plan))

    def training_step(self, text: Tensor) -> Tensor:
        loss = self.model(input_ids=text, labels=text).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.supar_param_groups(self.lr, weight_decay=0.1), betas=(0.9, 0.95))


def main() -> None:
    warnings.filterwarnings("ignore", message=".*(LeafSpec|does not have many workers)")
    console, text = Console(), StandardLibrary()
    text.setup("fit")

    sparse = ByteGPT(Setting("supar", WIDE, DENSITIES[-1], seed=0))
    print(sparse.supar_plan)  # 160 columns
    report = coord_check(
        ByteGPT,
        text.train_dataloader(),
        widths=[WIDE],
        densities=DENSITIES,
        seeds=[0],
        modules=BLOCKS,
        trainer={"accelerator": "cpu"},
    )
    console.print(report)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=100,
        limit_val_batches=0,
        callbacks=[SparsityReport()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(sparse, text)
    console.print(f"The sparsest comes to a loss of {trainer.callback_metrics['loss']:.3f} nats a byte.")


if __name__ == "__main__":
    main()
