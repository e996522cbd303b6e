"""What the tests of LISA share: runs with a Trainer of their own, and what is seen in them, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paro import state_access
from lightning_paro.callbacks import LISA
from tests.distributed.lisa import Net, batches, loss_of

OUTSIDE = {"embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}
"""What of ``Net`` is in no layer."""


ALL = {name for name, _ in Net().named_parameters()}
"""All of it."""


class Silent(Net):
    """Logs nothing, which costs time."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batch)


def of_layers(layers: Iterable[int]) -> set[str]:
    """Names of the parameters of some layers of ``Net``."""
    return {f"layers.{index}.{name}" for index in layers for name in ("inner.weight", "inner.bias", "outer.weight")}


def loader(count: int) -> DataLoader:
    return DataLoader(batches(count), batch_size=None)


def fit(
    lisa: LISA | None,
    module: LightningModule | None = None,
    *,
    count: int = 8,
    build: Callable[[], LightningModule] = Net,
    callbacks: Sequence[Callback] = (),
    resume: Any = None,
    data: Any = None,
    **settings: Any,
) -> tuple[Trainer, LightningModule]:
    """One process, one epoch of ``count`` batches in float64 unless told, from the same initial values each time."""
    if module is None:
        seed_everything(0, verbose=False)
        module = build()
    trainer = quiet(callbacks=[*([lisa] if lisa is not None else []), *callbacks], **settings)
    trainer.fit(module, data if data is not None else loader(count), ckpt_path=resume)
    return trainer, module


def quiet(**settings: Any) -> Trainer:
    """A Trainer on one CPU that shows and keeps nothing."""
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "64-true",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(**(defaults | settings))


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def moved(module: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """Names of the parameters that are not what they were."""
    return {name for name, p in module.named_parameters() if not torch.equal(before[name].to(p.dtype), p)}


def assert_close(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
    """In float64, by name."""
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


class Watch(Callback):
    """By optimizer step: which parameters have a gradient just before it, which are trained, which have state after.

    Attributes:
        gradients: Names of those with a gradient.
        trained: Names of those that require one.
        states: Names of those with optimizer state.
        active: LISA's layers.
        batch: Number of the micro-batch, in its epoch, that ends with the step.
    """

    def __init__(self) -> None:
        self.gradients: list[set[str]] = []
        self.trained: list[set[str]] = []
        self.states: list[set[str]] = []
        self.active: list[tuple[int, ...]] = []
        self.batch: list[int] = []
        self._now = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self._now = index

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.gradients.append({name for name, p in module.named_parameters() if p.grad is not None})
        self.trained.append(trained(module))
        self.active.append(next(c.active for c in trainer.callbacks if isinstance(c, LISA)))  # type: ignore[attr-defined]
        self.batch.append(self._now)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if len(self.states) < len(self.active):
            self.states.append(set(state_access(trainer).optimizer_state(module)))


class Save(Callback):
    """Save a checkpoint after some step.

    Args:
        path: Where to.
        step: The step.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step, self.is_done = path, step, False

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and not self.is_done:
            self.is_done = True
            trainer.save_checkpoint(self.path)
