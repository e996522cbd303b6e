"""Master weights of layers that LISA freezes: let go, they take with them what is below the resolution of bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_paro import ParoStrategy
from lightning_paro.algorithms.sampling import Draw
from tests.distributed.lisa import INTERVAL, Net, train
from tests.distributed.pool import WORLD_SIZE, Pool

PERIODS = [(0, 1), (2, 3), (0, 2), (1, 3)]
STEPS = INTERVAL * len(PERIODS)
SHORT = 2.0**-12
"""A step of a weight that is one: below it the numbers of bf16 are 2 ** -8 apart."""


def by_period(ask: Draw) -> Sequence[int]:
    return PERIODS[ask.period]


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(37))

    def forward(self) -> Tensor:
        return self.weight.sum()


class Ones(LightningModule):
    """Every gradient is one, so every step goes down by the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(One() for _ in range(4))
        self.last = One()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return torch.stack([layer() for layer in (*self.layers, self.last)]).float().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=SHORT)


def _steps_left(partitions: tuple[str, ...], precision: str, keep_master: bool) -> list[list[set[float]]]:
    """By partition and layer, how many steps a weight has made in the end."""
    found = []
    for partition in partitions:
        _, module, _ = train(
            ParoStrategy(partition, group_size=2), WORLD_SIZE, steps=STEPS, accumulate=1, clip=None,
            precision=precision, build=Ones, sampler=by_period, keep_master=keep_master,
        )  # fmt: skip
        found.append([set(((1 - p.detach()) / SHORT).tolist()) for p in module.parameters()])
    return found


@pytest.mark.parametrize(
    ("precision", "keep_master"),
    [("bf16-mixed", False), ("bf16-mixed", True), pytest.param("32-true", False, marks=pytest.mark.full)],
)
def test_short_steps_are_lost_with_the_master_and_only_with_it(
    pool: Pool, some: tuple[str, ...], precision: str, keep_master: bool
) -> None:
    """Each layer is trained in two periods; the last of layers 1 and 3 has not ended."""
    is_lost = precision == "bf16-mixed" and not keep_master
    layers = [{0.0}, {INTERVAL}, {0.0}, {INTERVAL}] if is_lost else [{2 * INTERVAL}] * 4
    for results in pool.run(_steps_left, some, precision, keep_master):
        for partition, found in zip(some, results, strict=True):
            assert found == [*layers, {STEPS}], partition


class Masters(Callback):
    """By layer, this rank's part of the master after the last step of a period, before the first of the next, and when
    it is trained again; comes after LISA.
    """

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}
        self.asleep: dict[int, Tensor] = {}
        self.slept: list[tuple[Tensor, Tensor]] = []
        self.woken: list[tuple[Tensor, Tensor]] = []

    def _masters(self, trainer: Trainer, module: LightningModule, active: tuple[int, ...]) -> dict[int, Tensor]:
        engine = trainer.strategy.engine
        return {i: engine.locate(module.layers[i].inner.weight)[0].master.clone() for i in active}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index % INTERVAL or not index:
            return
        before, now = PERIODS[index // INTERVAL - 1], PERIODS[index // INTERVAL]
        for number, frozen in self._masters(trainer, module, tuple({*before} - {*now})).items():
            self.slept.append((self.last[number], frozen))
            self.asleep[number] = frozen
        for number, woken in self._masters(trainer, module, tuple({*now} - {*before})).items():
            if number in self.asleep:
                self.woken.append((self.asleep.pop(number), woken))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.last |= self._masters(trainer, module, PERIODS[index // INTERVAL])


def _through_sleep(partitions: tuple[str, ...], keep_master: bool) -> list[Masters]:
    found = []
    for partition in partitions:
        masters = Masters()
        train(
            ParoStrategy(partition, group_size=2), WORLD_SIZE, steps=STEPS, accumulate=1, precision="bf16-mixed",
            callbacks=[masters], build=Net, sampler=by_period, keep_master=keep_master,
        )  # fmt: skip
        found.append(masters)
    return found


@pytest.mark.parametrize("keep_master", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_master_that_is_let_go_is_rounded_once_and_one_that_is_kept_stays(
    pool: Pool, few: tuple[str, ...], keep_master: bool
) -> None:
    for results in pool.run(_through_sleep, few, keep_master):
        for masters in results:
            assert (len(masters.slept), len(masters.woken)) == (5, 3)
            assert any(not torch.equal(last, last.bfloat16().float()) for last, _ in masters.slept)
            for last, frozen in masters.slept:
                assert last.dtype is torch.float32
                assert torch.equal(frozen, last if keep_master else last.bfloat16())
                assert frozen.dtype is (torch.float32 if keep_master else torch.bfloat16)
            for frozen, woken in masters.woken:
                assert woken.dtype is torch.float32
                assert torch.equal(woken, frozen.float())
