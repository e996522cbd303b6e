"""One optimizer step, written once: what every contestant does, and what each may do in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lab.models import loss_of
from benchmarks.lab.rank import Rank

__all__ = ["CLIP", "LR", "Contestant", "adamw", "short"]

CLIP = 1.0
LR = 1e-4


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of all contestants."""
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def short(dtype: torch.dtype) -> str:
    """Its name in a table."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


class Contestant:
    """Trains a module: s micro-batches, clipping by the global norm, AdamW.

    The compute dtype is bf16 on a GPU and fp32 on a CPU; master weights and AdamW's state are fp32. Who holds
    parameters in the compute dtype computes in it; who holds fp32 ones computes under autocast.

    Attributes:
        accumulator: Dtype, and part, of the gradient in which micro-batches are accumulated.
        mark: Called at the end of every forward, every backward and the update.
        leaks: Whether memory stays behind for good when it is let go.
    """

    accumulator = "fp32"
    autocast = False
    leaks = False
    module: Any
    optimizer: Any

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.steps = 0
        self.compute = torch.bfloat16 if rank.on_gpu else torch.float32
        self.mark: Callable[[], None] = lambda: None

    def step(self, batches: list[Tensor]) -> Tensor:
        """One optimizer step; returns this rank's mean loss, on the device."""
        self.steps += 1
        losses = []
        for number, batch in enumerate(batches, start=1):
            loss = self.micro_batch(batch, 1 / len(batches), is_last=number == len(batches))
            losses.append(loss.detach())
        self.update()
        self.mark()
        return torch.stack(losses).mean()

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        """Forward and backward."""
        loss = self.forward(batch)
        self.mark()
        (loss * share).backward()
        self.mark()
        return loss

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        if not self.autocast or self.compute is torch.float32:
            return loss_of(self.module, batch)
        with torch.autocast(self.rank.device.type, self.compute):
            return loss_of(self.module, batch)

    def update(self) -> None:
        """Everything between the last backward and the next forward."""
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Scale gradients so that their norm over everything is at most :data:`CLIP`."""
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)

    def counts(self) -> dict[str, Any]:
        """What it knows about itself."""
        return {}

    def close(self) -> None:
        """Let go of everything."""
