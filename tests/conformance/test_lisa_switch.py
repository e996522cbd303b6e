"""When layers are switched: every ``interval`` optimizer steps, and never inside of an accumulation window."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import OUTSIDE, Watch, assert_close, fit, of_layers, trained, values
from tests.distributed.lisa import TABLE, Net, by_hand, table, train


class EveryBatch(Callback):
    """By micro-batch: the steps made before it, and what is trained in it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, set[str]]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self.seen.append((trainer.global_step, trained(module)))


def _expected(step: int, interval: int) -> set[str]:
    return OUTSIDE | of_layers(TABLE[step // interval % len(TABLE)])


WINDOWS = [
    (1, [0, 1, 2, 3, 4, 5, 6, 7]),
    (2, [1, 3, 5, 7]),
    (3, [2, 5, 7]),  # two micro-batches at the end of each epoch
    (5, [4, 7]),
    (20, [7]),
]


@pytest.mark.parametrize(("window", "ends"), WINDOWS)
@pytest.mark.parametrize(
    "interval", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_layers_change_with_optimizer_steps_and_not_within_a_window(
    window: int, ends: list[int], interval: int
) -> None:
    watch, every = Watch(), EveryBatch()
    lisa = LISA(interval=interval, sampler=table)
    trainer, _ = fit(lisa, callbacks=[watch, every], accumulate_grad_batches=window, max_epochs=3)
    assert watch.batch == ends * 3
    steps = len(ends) * 3
    assert trainer.global_step == steps
    for step in range(steps):
        assert watch.gradients[step] == watch.trained[step] == watch.states[step] == _expected(step, interval)
    for step, names in every.seen:
        assert names == _expected(step, interval)
    periods = math.ceil(steps / interval)
    assert lisa.periods == [(n, n * interval, TABLE[n % len(TABLE)]) for n in range(periods)]


def test_a_window_that_grows_with_the_epochs() -> None:
    watch, every = Watch(), EveryBatch()
    schedule = GradientAccumulationScheduler({0: 1, 1: 4, 2: 3})
    fit(LISA(interval=3, sampler=table), callbacks=[watch, every, schedule], max_epochs=3)
    assert watch.batch == [*range(8), 3, 7, 2, 5, 7]
    assert watch.gradients == watch.states == [_expected(step, 3) for step in range(13)]
    assert all(names == _expected(step, 3) for step, names in every.seen)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("steps", [7, 8])
def test_the_values_are_those_of_training_by_hand(accumulate: int, steps: int) -> None:
    """Also where the last period is cut short by ``max_steps``."""
    _, module, lisa = train(steps=steps, accumulate=accumulate)
    assert_close(values(module), by_hand(steps, accumulate))
    assert [step for _, step, _ in lisa.periods] == [0, 3, 6]


# ---- what comes with a step -----------------------------------------------------------------------------------------


class Plain(Net):
    """Plain gradient descent, a step as long as the gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Moves(Callback):
    """By step: the change of every parameter."""

    def __init__(self) -> None:
        self.moves: list[dict[str, Tensor]] = []
        self._before: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        self._before = values(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.moves.append({name: value - self._before[name] for name, value in values(module).items()})


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_sees_the_gradients_of_what_is_trained(algorithm: Any) -> None:
    """All of the gradient's length is theirs: nothing stale or frozen counts."""
    moves = Moves()
    fit(
        LISA(interval=2, sampler=table), build=Plain, callbacks=[moves], gradient_clip_val=1e-4,
        gradient_clip_algorithm=algorithm,
    )  # fmt: skip
    assert len(moves.moves) == 8
    for step, move in enumerate(moves.moves):
        moved = {name for name, change in move.items() if change.any()}
        assert moved == _expected(step, 2)
        if algorithm == "norm":
            length = torch.cat([change.flatten() for change in move.values()]).norm().item()
            assert length == pytest.approx(1e-4, rel=1e-4)  # torch divides by the norm plus 1e-6
        else:
            assert max(change.abs().max().item() for change in move.values()) == pytest.approx(1e-4, rel=1e-9)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters(), "lr": 1e-3}, {"params": [], "lr": 1e-2}]
        inside = {id(p) for p in self.layers.parameters()}
        groups[1]["params"] = [p for p in self.parameters() if id(p) not in inside]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-1], total_steps=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Rates(Callback):
    """By step: learning rate and momentum of every param group, and how many parameters it has."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[float, float, int]]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.seen.append([(group["lr"], group["betas"][0], len(group["params"])) for group in optimizer.param_groups])


@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all"])
def test_a_schedule_runs_on_as_without_lisa(policy: Any) -> None:
    without, with_lisa = Rates(), Rates()
    fit(None, build=Scheduled, callbacks=[without])
    fit(LISA(interval=1, state_policy=policy), build=Scheduled, callbacks=[with_lisa])
    assert with_lisa.seen == without.seen
    assert len({groups[1][0] for groups in without.seen}) == 8


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "held"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_half_precision(precision: Any, held: torch.dtype) -> None:
    watch = Watch()
    trainer, module = fit(LISA(interval=2, sampler=table), callbacks=[watch], precision=precision)
    assert watch.gradients == watch.states == [_expected(step, 2) for step in range(8)]
    assert {p.dtype for p in module.parameters()} == {held}
    moments = {state["exp_avg"].dtype for state in trainer.optimizers[0].state.values()}
    assert moments == {held}


@pytest.mark.gpu
def test_scaled_gradients() -> None:
    watch = Watch()
    fit(
        LISA(interval=2, sampler=table), callbacks=[watch], precision="16-mixed", accelerator="gpu",
        gradient_clip_val=0.5,
    )  # fmt: skip
    assert watch.gradients == watch.trained == [_expected(step, 2) for step in range(8)]
