"""The same work through Lightning's Trainer, to show that it takes as long as the plain loop and learns the same."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.lab.loop import CLIP, adamw
from benchmarks.lab.models import build, loss_of, tokens
from benchmarks.lab.rank import Rank
from benchmarks.lab.train import Clock
from lightning_paro import ParoStrategy

__all__ = ["measure"]


class Module(LightningModule):
    """A language model; ``clips`` by itself under DDP, where Lightning refuses to for a fused optimizer."""

    def __init__(self, model: torch.nn.Module, clips: bool) -> None:
        super().__init__()
        self.model, self._clips = model, clips

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)


class Stopwatch(Callback):
    """Marks the end of each optimizer step after the warm-up, and keeps the losses of all."""

    def __init__(self, rank: Rank, warmup: int, accumulate: int) -> None:
        self.clock = Clock(rank.on_gpu)
        self.losses: list[Tensor] = []
        self.peak = 0
        self._rank, self._warmup, self._accumulate = rank, warmup, accumulate
        self._window: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._window.append(outputs["loss"].detach())
        if len(self._window) < self._accumulate:
            return
        self.losses.append(torch.stack(self._window).sum())  # the Trainer has divided each by their number
        self._window.clear()
        if len(self.losses) == self._warmup - 1:
            self._rank.barrier()
        if len(self.losses) == self._warmup and self._rank.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if len(self.losses) >= self._warmup:
            self.clock.mark()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._rank.barrier()
        self.peak = torch.cuda.max_memory_allocated() if self._rank.on_gpu else 0


def measure(
    rank: Rank,
    model: str,
    accumulate: int,
    warmup: int,
    measured: int,
    strategy: str,
    callbacks: Sequence[Callback] = (),
    **_: Any,
) -> dict[str, Any]:
    """As :func:`benchmarks.lab.train.measure`, by a Trainer of ``strategy`` in bf16-mixed (fp32 on a CPU)."""
    before = rank.clean()
    started = time.perf_counter()
    size, is_ddp = rank.topology.group_size, strategy == "ddp"
    chosen: Any = DDPStrategy(gradient_as_bucket_view=True) if is_ddp else ParoStrategy(strategy, group_size=size)
    watch = Stopwatch(rank, warmup, accumulate)
    batches = tokens(model, rank.rank, accumulate, torch.device("cpu")) * (warmup + measured)
    trainer = Trainer(
        strategy=chosen, plugins=[TorchElasticEnvironment()], precision="bf16-mixed" if rank.on_gpu else "32-true",
        accelerator="gpu" if rank.on_gpu else "cpu", devices=size, num_nodes=rank.topology.num_groups, max_epochs=1,
        accumulate_grad_batches=accumulate, gradient_clip_val=None if is_ddp else CLIP,
        callbacks=[*callbacks, watch], logger=False, use_distributed_sampler=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Module(build(model, rank.device), is_ddp), DataLoader(batches, batch_size=None))
    losses = [float(loss) for loss in watch.losses]
    result = {
        "seconds": watch.clock.seconds(), "peak_bytes": watch.peak, "before_bytes": before, "first_loss": losses[0],
        "loss": losses[-1], "accumulator": "fp32, N" if is_ddp else f"fp32, {chosen.partition.g.name}",
    }  # fmt: skip
    del trainer, chosen, watch
    gc.collect()
    rank.clean()
    return result | {"total_s": time.perf_counter() - started}
