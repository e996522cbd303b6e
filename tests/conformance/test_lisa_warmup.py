"""The first steps of a layer that was just activated are as small as they should be, whatever else scales steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Save, assert_close, fit, values
from tests.distributed.lisa import LR, TABLE, Net, batches, loss_of, table, train
from tests.distributed.pool import Pool

Make = Callable[..., torch.optim.Optimizer]

SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
ADAMW = partial(torch.optim.AdamW, eps=1e-5, weight_decay=0.1)


class Warmed(Net):
    """Net with an optimizer and a schedule; micro-batches are the same at every step if asked to, for resuming."""

    def __init__(self, make: Make = ADAMW, constant: bool = False) -> None:
        super().__init__()
        self.make, self.constant = make, constant

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0].to(batch.device) if self.constant else batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def by_hand(
    make: Make, steps: int, interval: int, warmup: int, clip: float | None, policy: str = "drop_frozen"
) -> dict[str, Tensor]:
    """One optimizer a layer, made when the layer is activated; its learning rate grows with the steps it has made."""
    seed_everything(0, verbose=False)
    net = Net().double()
    layers = [list(layer.parameters()) for layer in net.layers]
    inside = {id(p) for layer in layers for p in layer}
    outside = [p for p in net.parameters() if id(p) not in inside]
    always = make(outside, lr=LR)
    awake: dict[int, tuple[torch.optim.Optimizer, int]] = {}
    for step, batch in enumerate(batches(steps)):
        active = TABLE[step // interval % len(TABLE)]
        if step % interval == 0:
            if policy == "reset_all" and step:
                always, awake = make(outside, lr=LR), {}
            awake = {index: awake.get(index, (make(layers[index], lr=LR), 0)) for index in active}
        trained = [*outside, *(p for index in active for p in layers[index])]
        for parameter in net.parameters():
            parameter.grad = None
            parameter.requires_grad = any(parameter is p for p in trained)
        loss_of(net, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip)
        rate = LR * (1 - 0.9 * min(step, 20) / 20)
        always.param_groups[0]["lr"] = rate
        always.step()
        for index, (optimizer, made) in awake.items():
            optimizer.param_groups[0]["lr"] = rate * min((made + 1) / (warmup + 1), 1)
            optimizer.step()
            awake[index] = (optimizer, made + 1)
    return values(net)


CASES = [
    (3, 2),  # two of a period's three steps
    (1, 3),  # layers of several ages at a time
    (2, 5),  # longer than a period
]


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(("interval", "warmup"), CASES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_steps_are_scaled_exactly(make: Make, interval: int, warmup: int, clip: float | None) -> None:
    lisa = LISA(interval=interval, sampler=table, warmup=warmup)
    _, module = fit(lisa, build=partial(Warmed, make), count=14, gradient_clip_val=clip)
    expected = by_hand(make, 14, interval, warmup, clip)
    assert_close(values(module), expected)
    without = by_hand(make, 14, interval, 0, clip)
    assert max((without[name] - value).abs().max() for name, value in expected.items()) > 1e-4


def test_a_reset_of_all_state_warms_up_those_that_stay() -> None:
    """Layer 3 of the first two periods."""
    lisa = LISA(interval=3, sampler=table, warmup=2, state_policy="reset_all")
    _, module = fit(lisa, build=partial(Warmed, ADAMW), count=8)
    assert_close(values(module), by_hand(ADAMW, 8, 3, 2, None, "reset_all"))


def _on_ranks(name: str, make: Make) -> dict[str, Tensor]:
    _, module, _ = train(
        "ddp" if name == "ddp" else ParoStrategy(name, group_size=2), 4, steps=9, accumulate=1, clip=0.3,
        build=partial(Warmed, make), interval=2, warmup=3,
    )  # fmt: skip
    return values(module)


@pytest.mark.parametrize("name", ["nig", "ggg", "ddp"])
@pytest.mark.parametrize("make", [pytest.param(SGD, marks=pytest.mark.full), ADAMW], ids=["sgd", "adamw"])
def test_on_several_ranks(pool: Pool, name: str, make: Make) -> None:
    expected = by_hand(make, 9, 2, 3, 0.3)
    for found in pool.run(_on_ranks, name, make):
        assert_close(found, expected)


# ---- several optimizers ---------------------------------------------------------------------------------------------


class Shared(Warmed):
    """Matrices of the layers in one optimizer, all else in another; which steps first is asked."""

    def __init__(self, matrices_first: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.matrices_first = matrices_first

    def configure_optimizers(self) -> Any:
        matrices = {id(p) for p in self.layers.parameters() if p.ndim == 2}
        groups = ([p for p in self.parameters() if (id(p) in matrices) == wanted] for wanted in (True, False))
        first, second = (ADAMW(group, lr=LR) for group in groups)
        return [first, second] if self.matrices_first else [second, first]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss_of(self, batch))
        rate = LR * (1 - 0.9 * min(index, 20) / 20)
        for optimizer in self.optimizers():
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()


@pytest.mark.parametrize("matrices_first", [True, False])
def test_a_layer_with_parts_in_two_optimizers(matrices_first: bool) -> None:
    lisa = LISA(interval=3, sampler=table, warmup=2)
    _, module = fit(lisa, build=lambda: Shared(matrices_first), count=11)
    assert_close(values(module), by_hand(ADAMW, 11, 3, 2, None))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 4, 5, 6])
@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all"])
def test_a_warmup_goes_on_where_it_was_saved(tmp_path: Path, step: int, policy: Any) -> None:
    def lisa() -> LISA:
        return LISA(interval=3, sampler=table, warmup=4, state_policy=policy)

    build = partial(Warmed, ADAMW, constant=True)
    settings = {"build": build, "max_steps": 10, "count": 10, "precision": "32-true"}  # Lightning loads into float32
    _, whole = fit(lisa(), callbacks=[Save(tmp_path / "mid.ckpt", step)], **settings)
    _, resumed = fit(lisa(), resume=tmp_path / "mid.ckpt", **settings)
    for name, value in values(whole).items():
        assert torch.equal(value, resumed.get_parameter(name)), name
