"""What is measured of SμPar: models of bytes, of any width and density, whose plan follows from a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lab.learning_text import batches, topics
from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.experiments import Setting
from lightning_paro.mixins import SuParMixin

__all__ = ["MODELS", "Subject", "Writer", "text"]

LENGTH, BATCH = 128, 4
HEAD, LAYERS = 32, 2


@dataclass(frozen=True)
class Subject:
    """A family of models, and the hyperparameters that all of them are trained with.

    Attributes:
        base: Width of the base model.
        lr: Base learning rate.
        plan: Arguments of :meth:`SuParPlan.from_model`.
    """

    base: int
    lr: float
    plan: dict[str, float]


MODELS = {
    # hyperparameters of the paper's figure 5, which were tuned on another model, of width 256
    "llama": Subject(64, 1.68e-2, {"init_std": 0.101, "alpha_input": 11.22, "alpha_output": 1.0}),
    "perceptron": Subject(64, 2**-7, {"init_std": 64**-0.5}),
}


class Writer(SuParMixin, LightningModule):
    """A model of the next byte, with its plan.

    Args:
        name: ``"llama"``: two layers with rotary positions and SwiGLU, heads of 32, an inner width of 8/3, embeddings
            tied. ``"perceptron"``: an embedding, two residual blocks of two matrices, and a head.
        setting: Of which parameterization, width, density and seed.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__()
        subject = MODELS[name]
        self.lr = subject.lr if setting.lr is None else setting.lr
        with torch.random.fork_rng():  # values that are drawn over anyway
            self.model = _build(name, setting.width)
        with torch.device("meta"):
            base = _build(name, subject.base)
        plan = SuParPlan.from_model(
            self.model, base_config=base, density=setting.density, parameterization=setting.parameterization,
            seed=setting.seed, **subject.plan,
        )  # fmt: skip
        self.supar_setup(plan)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.model(batch)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(self.lr), betas=(0.9, 0.95))


class Block(nn.Module):
    """Two matrices on a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Perceptron(nn.Module):
    """The next byte from the last one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _build(name: str, width: int) -> nn.Module:
    if name == "perceptron":
        return Perceptron(width)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3 // 8 * 8, num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD, head_dim=HEAD, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def text(steps: int) -> DataLoader[Any]:
    """Batches of bytes of ``pydoc``'s topics, the same for every run."""
    return DataLoader(list(batches(topics(), steps, BATCH, LENGTH, seed=0)), batch_size=None)  # type: ignore[arg-type]
