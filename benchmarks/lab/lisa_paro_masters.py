"""What is lost when LISA freezes a layer and lets its fp32 master weights go: the part of an update below bf16.

A layer that is frozen keeps its weights in the compute dtype. Its master is rounded to it, once a period; while a layer
is trained nothing is lost.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.lab.learning_runs import Lab
from benchmarks.lab.learning_text import batches
from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from lightning_paro.sharding import Engine

__all__ = ["ARMS", "RATES", "Arm", "Losses", "run", "start_of", "study"]

RATES = (1e-5, 3e-5, 1e-4, 1e-3)
STEPS, SEQUENCES, INTERVAL, LAYERS = 200, 2, 10, 2


@dataclass(frozen=True)
class Arm:
    """How a model is trained, by a constant rate."""

    precision: str
    keep_master: bool = False

    @property
    def name(self) -> str:
        """As it stands in tables."""
        if self.precision == "32-true":
            return "fp32"
        return f"bf16-mixed, masters {'kept' if self.keep_master else 'dropped'}"


ARMS = (Arm("32-true"), Arm("bf16-mixed", keep_master=True), Arm("bf16-mixed"))


class Losses(Callback):
    """What each layer loses of its update when it is frozen; comes after LISA among the callbacks.

    Of a layer that was w when it woke and whose master was m when it went to sleep, which left s of it, that is
    ``|s - m| / |m - w|``, norms over all of the layer's parameters; on this rank's part of them.
    """

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self._woke: dict[int, Tensor] = {}
        self._latest: dict[int, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        active = _lisa(trainer).active
        for number in [number for number in self._woke if number not in active]:
            woke, master = self._woke.pop(number), self._latest.pop(number)
            lost, moved = self._values(trainer, module, number) - master, master - woke
            self.fractions.append(float(lost.norm() / moved.norm()))
        for number in active:
            if number not in self._woke:
                self._woke[number] = self._values(trainer, module, number)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._latest = {number: self._values(trainer, module, number) for number in _lisa(trainer).active}

    def _values(self, trainer: Trainer, module: LightningModule, number: int) -> Tensor:
        """A copy of what the optimizer works on, or would, were the layer trained; fp32, flat."""
        assert isinstance(trainer.strategy, ParoStrategy)
        engine: Engine = trainer.strategy.engine
        layer = module.get_submodule(_lisa(trainer).names[number])
        flats = dict.fromkeys(engine.locate(parameter)[0] for parameter in layer.parameters())
        return torch.cat([flat.master.detach().float() for flat in flats])


def _lisa(trainer: Trainer) -> LISA:
    return next(callback for callback in trainer.callbacks if isinstance(callback, LISA))


class Learner(LightningModule):
    """A language model of bytes, trained by a constant rate."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, text: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def study(lab: Lab) -> dict[str, Any]:
    """What all rows share."""
    return {
        "parameters": sum(p.numel() for p in lab.start.parameters()), "length": lab.study.length, "steps": STEPS,
        "sequences": SEQUENCES, "layers": LAYERS, "interval": INTERVAL, "held_out": len(lab.held_out),
        "start": lab.digest,
    }  # fmt: skip


def start_of(lab: Lab) -> nn.Module:
    """The pre-trained weights, rounded to bf16 as those of published models are: so all arms begin with the same."""
    model = copy.deepcopy(lab.start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def run(lab: Lab, arm: Arm, lr: float, seed: int = 0) -> dict[str, Any]:
    """Train in one process; the row has what every sleep lost, and the held-out loss of the weights, computed in fp32.

    Args:
        lab: Its texts, and the weights to begin with.
        arm: How.
        lr: Learning rate.
        seed: Of the text that is drawn, and of the layers.
    """
    model, losses = start_of(lab), Losses()
    lisa = LISA(LAYERS, INTERVAL, keep_master=arm.keep_master, seed=seed)
    before = held_out_loss(model, lab.held_out)
    text = batches(lab.text, STEPS, SEQUENCES, lab.study.length, seed)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=ParoStrategy("nnn", group_size=1), precision=arm.precision,
        max_epochs=1, gradient_clip_val=1.0, callbacks=[lisa, losses], logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Learner(model, lr), torch.utils.data.DataLoader(text, batch_size=None))
    after = held_out_loss(model, lab.held_out)
    return {"arm": asdict(arm), "lr": lr, "seed": seed, "lost": losses.fractions, "before": before, "loss": after}


@torch.no_grad()
def held_out_loss(model: Any, windows: Tensor) -> float:
    """Nats a byte."""
    parts = [model(input_ids=part, labels=part).loss * len(part) for part in windows.split(16)]
    return float(torch.stack(parts).sum()) / len(windows)
