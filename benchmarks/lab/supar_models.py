"""What is measured of SμPar: models of bytes, of any width and density, whose plan follows from a setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lab.learning_text import batches, sources, topics
from benchmarks.lab.supar_gpt import GPT
from benchmarks.lab.supar_protocol import SUBJECTS, Study, Subject
from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.experiments import Setting
from lightning_paro.mixins import SuParMixin

__all__ = ["MODELS", "Writer", "text", "text_of"]

HEAD, LAYERS = 32, 2


class Writer(SuParMixin, LightningModule):
    """A model of the next byte, with its plan.

    Args:
        name: A key of :data:`~benchmarks.lab.supar_protocol.SUBJECTS`.
        setting: Of which parameterization, width, density and seed.
        arm: A key of :data:`~benchmarks.lab.supar_protocol.ARMS`; the setting's parameterization, unless told.
        steps: All there will be, if learning rates rise over a tenth of them and fall linearly to a tenth.
    """

    def __init__(self, name: str, setting: Setting, arm: str | None = None, steps: int | None = None) -> None:
        super().__init__()
        subject = SUBJECTS[name]
        self.lr = subject.lr if setting.lr is None else setting.lr
        self.steps = steps
        with torch.random.fork_rng():  # values that are drawn over anyway
            self.model = MODELS[subject.model](setting.width)
        self.supar_setup(_plan(self.model, subject, setting, arm or setting.parameterization))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.model(batch)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(self.supar_param_groups(self.lr), betas=(0.9, 0.95), fused=fused)
        if self.steps is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_factor, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _factor(steps: int, step: int) -> float:
    warmup = max(steps // 10, 1)
    return min((step + 1) / warmup, 1 - 0.9 * max(step - warmup, 0) / (steps - warmup))


def _plan(model: nn.Module, subject: Subject, setting: Setting, arm: str) -> SuParPlan:
    """The plan of an arm; one that mixes has entries of two."""
    with torch.device("meta"):
        base = MODELS[subject.model](subject.base)
    options = {**subject.plan, "init_std": subject.std(arm, setting.width)}
    make = partial(SuParPlan.from_model, model, base_config=base, density=setting.density, seed=setting.seed, **options)
    plan = make(parameterization=setting.parameterization)
    if arm in ("init", "lr"):
        rules = ("init_std",) if arm == "lr" else ("lr_factor", "sgd_lr_factor", "weight_decay_factor")
        dense = make(parameterization="mup")
        entries = {
            name: replace(entry, **{rule: getattr(dense[name], rule) for rule in rules}) for name, entry in plan.items()
        }
        plan = replace(plan, entries=entries)
    return plan


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
    """The next byte from the last ones.

    Args:
        width: Of the residual stream.
        window: How many bytes it looks at.
    """

    def __init__(self, width: int, window: int = 1) -> None:
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(256 * window, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        places = range(self.window)  # of each byte its own table; before the first one stand zeros
        shifted = [nn.functional.pad(tokens, (place, 0))[:, : tokens.shape[1]] + 256 * place for place in places]
        x = self.embedding(torch.stack(shifted, -1)).mean(-2) * self.window**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _llama(width: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3 // 8 * 8, num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD, head_dim=HEAD, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "llama": _llama,
    "perceptron": Perceptron,
    "window": partial(Perceptron, window=8),
    "gpt": partial(GPT, layers=LAYERS, head_dim=64),
    "gpt-4-layers": partial(GPT, layers=4, head_dim=64),
    "gpt-heads-32": partial(GPT, layers=LAYERS, head_dim=HEAD),
}
"""By width. Llama has rotary positions and SwiGLU with an inner width of 8/3; its embeddings are tied, as GPT's are."""


def text(name: str, steps: int) -> DataLoader[Any]:
    """Batches for a coordinate check, the same for every run: of ``pydoc``'s topics, four sequences of 128 bytes, and
    2048 for GPT."""
    length = 2048 if name.startswith("gpt") else 128
    return _loader(batches(topics(), steps, 4, length, seed=0))


def text_of(study: Study) -> DataLoader[Any]:
    """Batches of a study, the same for every run: pieces of the standard library's sources, none of them twice."""
    train, _ = sources()
    count = study.steps * study.batch
    pieces = train[: len(train) // study.length * study.length].view(-1, study.length)
    if len(pieces) < count:
        raise ValueError(f"{count} pieces of {study.length} bytes are needed, and the text has {len(pieces)}.")
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))[:count]
    return _loader(pieces[order].long().view(study.steps, study.batch, study.length))


def _loader(batches: Tensor) -> DataLoader[Any]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]
