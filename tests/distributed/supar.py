"""SμPar with masks on a small model, and the same training by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.mixins import SuParMixin

WIDTH, BASE, LAYERS, MICRO = 10, 5, 3, 8
LR, DECAY, CLIP = 1e-2, 0.1, 0.3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Plain(LightningModule):
    """An embedding, layers of sizes that divide by nothing, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Net(SuParMixin, Plain):
    """The same, with a plan."""

    def __init__(self, density: float = 0.5, seed: int = 1, **options: Any) -> None:
        super().__init__()
        plan = {"base_width": BASE, "density": density, "seed": seed, "init_std": 0.3, "alpha_input": 2.0, **options}
        self.supar_setup(SuParPlan.from_model(self, **plan))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.supar_param_groups(LR, DECAY), eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Thawing(Plain):
    """Its second layer is frozen until the fifth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 4:
            self.layers[1].requires_grad_(True)


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(batch).flatten(0, 1), batch.roll(1, 1).flatten())


def batches(count: int) -> list[Tensor]:
    """Micro-batches for all ranks together."""
    tokens = torch.randint(11, (count * MICRO, 4), generator=torch.Generator().manual_seed(1))
    return list(tokens.split(MICRO))


def train(
    strategy: Any = "auto",
    devices: int = 1,
    *,
    steps: int = 5,
    accumulate: int = 2,
    precision: Any = "64-true",
    callbacks: Sequence[Callback] = (),
    build: Callable[[], LightningModule] = Net,
    resume: Any = None,
    **settings: Any,
) -> tuple[Trainer, LightningModule]:
    """Train under a strategy; every rank has its part of each micro-batch."""
    seed_everything(0, verbose=False)
    module = build()
    here = int(os.environ.get("RANK", 0)) if devices > 1 else 0
    mine = [batch.chunk(devices)[here] for batch in batches(steps * accumulate)]
    trainer = Trainer(
        strategy=strategy, devices=devices, precision=precision, max_steps=steps,
        callbacks=list(callbacks), enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=accumulate,
        **{"accelerator": "cpu", "gradient_clip_val": CLIP, "logger": False, **settings},
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None), ckpt_path=resume)
    return trainer, module


def by_hand(steps: int = 5, accumulate: int = 2, clip: float | None = CLIP) -> dict[str, Tensor]:
    """The parameters after the same training in plain torch, in float64."""
    net = Net()
    plan, net = net.supar_plan, net.double()
    assert plan is not None
    masks = {name: plan.mask(name) for name in plan.sparse}
    groups = [
        {"params": [parameter], "lr": LR * plan[name].lr_factor, "weight_decay": DECAY * plan[name].weight_decay_factor}
        for name, parameter in net.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, eps=1e-5)
    rates = [group["lr"] for group in optimizer.param_groups]
    data = iter(batches(steps * accumulate))
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (loss_of(net, next(data)) / accumulate).backward()
        for name, mask in masks.items():
            net.get_parameter(name).grad *= mask  # type: ignore[operator]
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.9 * min(step, 20) / 20)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}
