"""LISA on a small model, and the same training by hand: one optimizer for each part, made anew when it wakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_paro.algorithms.sampling import Draw
from lightning_paro.callbacks import LISA

LAYERS = 5
WIDTH = 6
INTERVAL = 3
TABLE = [(0, 3), (3, 4), (1, 2), (0, 4), (2, 3), (0, 1)]
"""Layers by period, instead of draws: 3 stays for a second period, all are trained at some time."""
LR = 1e-2
MICRO = 8  # rows of a micro-batch, over all ranks


def table(ask: Draw) -> Sequence[int]:
    return TABLE[ask.period % len(TABLE)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 7)
        self.outer = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


class Net(LightningModule):
    """An embedding, layers, a norm and a head."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        self.optimizer = optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = loss_of(self, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=LR, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def batches(count: int) -> list[Tensor]:
    """Micro-batches for all ranks together."""
    tokens = torch.randint(11, (count * MICRO, 4), generator=torch.Generator().manual_seed(1))
    return list(tokens.split(MICRO))


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def train(
    strategy: Any = "auto",
    devices: int = 1,
    *,
    nodes: int = 1,
    accelerator: str = "cpu",
    steps: int = 3 * INTERVAL + 1,
    accumulate: int = 2,
    clip: float | None = 0.5,
    precision: Any = "64-true",
    callbacks: Sequence[Callback] = (),
    build: Callable[[], LightningModule] | None = None,
    resume: Any = None,
    shuffled: bool = False,
    **options: Any,
) -> tuple[Trainer, LightningModule, LISA]:
    """Train with LISA under a strategy; every rank has its part of each micro-batch."""
    seed_everything(0, verbose=False)
    lisa = LISA(**{"num_layers": 2, "interval": INTERVAL, "sampler": table, **options})
    module = (build or Net)()
    here = int(os.environ.get("RANK", 0)) if devices > 1 else 0
    mine = [batch.chunk(devices)[here] for batch in batches(steps * accumulate)]
    trainer = Trainer(
        strategy=strategy, devices=devices // nodes, num_nodes=nodes, accelerator=accelerator, precision=precision,
        max_epochs=1, logger=False, callbacks=[lisa, *callbacks], enable_checkpointing=False,
        enable_progress_bar=False, max_steps=steps,
        enable_model_summary=False, use_distributed_sampler=False, accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None), ckpt_path=resume)
    return trainer, module, lisa


def by_hand(
    steps: int,
    accumulate: int = 2,
    clip: float | None = 0.5,
    policy: str = "drop_frozen",
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The parameters after the same training in plain torch."""
    seed_everything(0, verbose=False)
    net = Net().to(dtype)
    layers = [list(layer.parameters()) for layer in net.layers]
    outside = [p for p in net.parameters() if not any(p is q for layer in layers for q in layer)]
    make = lambda parameters: torch.optim.AdamW(parameters, lr=LR, eps=1e-5)  # noqa: E731
    always, of_layers = make(outside), {}
    data = iter(batches(steps * accumulate))
    before: tuple[int, ...] = ()
    for step in range(steps):
        active = TABLE[(step // INTERVAL) % len(TABLE)]
        if step % INTERVAL == 0:
            if policy == "reset_all" and step:
                always, of_layers = make(outside), {}
            for index in active:
                kept = policy in ("keep", "offload") or (index in before and policy == "drop_frozen")
                if not (kept and index in of_layers):
                    of_layers[index] = make(layers[index])
            before = active
        trained = [*outside, *(p for index in active for p in layers[index])]
        for parameter in net.parameters():
            parameter.grad = None
            parameter.requires_grad = any(parameter is p for p in trained)
        for _ in range(accumulate):
            (loss_of(net, next(data)) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        for optimizer in (always, *(of_layers[index] for index in active)):
            optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * min(step, 20) / 20)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}
