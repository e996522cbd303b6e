"""LISA under manual optimization: one optimizer, two that take turns, and two that share the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import OUTSIDE, Watch, assert_close, fit, loader, of_layers, quiet, trained, values
from tests.distributed.lisa import TABLE, Net, by_hand, loss_of, rank, table
from tests.distributed.pool import Pool

INTERVAL = 2


class Manual(Net):
    """Windows of two micro-batches; steps with a closure if asked to.

    Args:
        closure: Whether the last backward of a window is in a closure.
    """

    def __init__(self, closure: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.closure = closure

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = loss_of(self, batch) / 2
            self.manual_backward(loss)
            return loss

        if index % 2 == 0:
            closure()
        elif self.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        if index % 2:
            optimizer.zero_grad()
            self.lr_schedulers().step()


@pytest.mark.parametrize(
    ("closure", "policy"),
    [
        (True, "drop_frozen"), (False, "keep"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [
            (False, "drop_frozen"), (True, "keep"), (False, "reset_all"), (True, "reset_all")
        ]),
    ],
)  # fmt: skip
def test_one_optimizer_trains_as_automatic_optimization_does(closure: bool, policy: Any) -> None:
    watch = Watch()
    lisa = LISA(interval=3, sampler=table, state_policy=policy)
    _, module = fit(lisa, build=lambda: Manual(closure), callbacks=[watch], count=20)
    assert_close(values(module), by_hand(10, 2, clip=None, policy=policy))
    assert [step for _, step, _ in lisa.periods] == [0, 3, 6, 9]
    assert watch.gradients == watch.trained == [OUTSIDE | of_layers(TABLE[step // 3]) for step in range(10)]


class SeveralSteps(Net):
    """Two steps in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(loss_of(self, batch))
            optimizer.step()


def test_every_step_counts_and_switches_wait_for_the_next_batch() -> None:
    lisa, watch = LISA(interval=3, sampler=table), Watch()
    fit(lisa, build=SeveralSteps, callbacks=[watch], count=6)
    assert lisa.periods == [(0, 0, TABLE[0]), (1, 4, TABLE[1]), (2, 6, TABLE[2]), (3, 10, TABLE[3])]


# ---- several optimizers ---------------------------------------------------------------------------------------------


class Gan(Net):
    """A judge of two layers beside the net that LISA samples; the judge steps every time, the net every second.

    Args:
        toggle: ``"model"``, ``"optimizer"`` or ``""``: how the other one is kept out of a backward.
        judge_first: Whether the judge's optimizer is the first.
    """

    def __init__(self, toggle: str, judge_first: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.judge_first = toggle, judge_first
        self.judge = nn.Sequential(nn.Linear(11, 5), nn.Linear(5, 1))

    def configure_optimizers(self) -> Any:
        judged = {id(p) for p in self.judge.parameters()}
        net = torch.optim.AdamW([p for p in self.parameters() if id(p) not in judged], lr=1e-2)
        judge = torch.optim.SGD(self.judge.parameters(), lr=1e-2)
        return [judge, net] if self.judge_first else [net, judge]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        judge, net = self.optimizers() if self.judge_first else reversed(self.optimizers())
        self._turn(judge, self.judge, self(batch).detach())
        if index % 2:
            self._turn(net, self.judge, None, batch)

    def _turn(self, optimizer: Any, judge: nn.Module, seen: Any, batch: Any = None) -> None:
        if self.toggle == "model":
            with optimizer.toggle_model():
                self._step(optimizer, judge, seen, batch)
        elif self.toggle == "optimizer":
            self.toggle_optimizer(optimizer)
            self._step(optimizer, judge, seen, batch)
            self.untoggle_optimizer(optimizer)
        else:
            self._step(optimizer, judge, seen, batch)

    def _step(self, optimizer: Any, judge: nn.Module, seen: Any, batch: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(judge(self(batch) if seen is None else seen).square().mean())
        optimizer.step()


@pytest.mark.parametrize("toggle", ["model", "optimizer", ""])
@pytest.mark.parametrize("judge_first", [True, False])
def test_the_optimizer_that_has_the_layers_counts(toggle: str, judge_first: bool) -> None:
    lisa = LISA(interval=INTERVAL, sampler=table, layers="layers")
    module = Gan(toggle, judge_first)
    before, everything = values(module), trained(module)
    watch = Watch()
    trainer, _ = fit(lisa, module, callbacks=[watch], count=12)
    assert trainer.global_step == 12 + 6
    assert lisa.periods == [(0, 0, TABLE[0]), (1, 2, TABLE[1]), (2, 4, TABLE[2])]
    assert trained(module) == everything
    judge = {name for name in before if name.startswith("judge")}
    for batch, states in enumerate(watch.states):
        active = of_layers(TABLE[batch // 4]) if batch % 4 else set()  # the first batch of a period has no step of it
        kept = of_layers(set(TABLE[batch // 4]) & set(TABLE[max(batch - 1, 0) // 4])) if batch > 1 else set()
        assert states - judge - OUTSIDE == active | kept
    assert not any(torch.equal(before[name].double(), p) for name, p in module.named_parameters())


def _gan(strategy: Any, devices: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Gan("model")
    lisa = LISA(interval=INTERVAL, sampler=table, layers="layers")
    parts = [batch.chunk(devices)[rank()] for batch in loader(12)]
    data = torch.utils.data.DataLoader(parts, batch_size=None)
    quiet(callbacks=[lisa], strategy=strategy, devices=devices).fit(module, data)
    assert len(lisa.periods) == 3
    return values(module)


def _gan_on_ranks(partition: str) -> dict[str, Tensor]:
    return _gan(
        "ddp_find_unused_parameters_true" if partition == "ddp" else ParoStrategy(partition, group_size=2), devices=4
    )


@pytest.mark.parametrize("partition", ["ddp", "iig"])
def test_two_optimizers_on_four_ranks_equal_one_process(pool: Pool, partition: str) -> None:
    expected = _gan("auto", devices=1)
    for found in pool.run(_gan_on_ranks, partition):
        assert_close(found, expected)


class Split(Net):
    """One optimizer for the matrices, as Muon takes them, and one for all else: every layer has parts in both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.parameters() if id(p) not in chosen]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        muon, adam = self.optimizers()
        for optimizer in (muon, adam):
            optimizer.zero_grad()
        self.manual_backward(loss_of(self, batch))
        for optimizer in (muon, adam):
            optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all"])
def test_two_optimizers_that_share_each_layer(policy: Any) -> None:
    lisa, watch = LISA(interval=INTERVAL, sampler=table, state_policy=policy), Watch()
    fit(lisa, build=Split, callbacks=[watch], count=12)
    assert [step for _, step, _ in lisa.periods] == [0, 2, 4, 6, 8, 10]
    assert watch.gradients[::2] == watch.trained[::2] == watch.states
    assert watch.states == [OUTSIDE | of_layers(TABLE[step // INTERVAL]) for step in range(12)]
