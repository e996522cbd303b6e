"""Manual optimization: a GAN, own accumulation windows, and checkpoints in the middle of one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_paro import ParoStrategy
from tests.conformance.support import ALL, SPREAD, Block, Regressor, assert_close, by_default, rank, trainer, values
from tests.distributed.pool import Pool, WorkerError


class _Part(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(inputs, 6)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.outlet = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.blocks(self.inlet(x)))


class _Gan(Regressor):
    """Two optimizers; the discriminator steps every time, the generator every second time.

    Args:
        how: ``"toggle_optimizer"``, ``"toggle_model"`` or ``"neither"``. With the toggles the judge gets no gradient in
            the generator's turn, so that it may clear its own right after its step.
    """

    def __init__(self, how: str) -> None:
        LightningModule.__init__(self)
        self.automatic_optimization = False
        self.how = how
        with torch.random.fork_rng():
            torch.manual_seed(1000 * rank())
            self.generator, self.judge = _Part(5, 3), _Part(3, 1)
            self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
        ]

    def turn(self, optimizer: Any, sync: bool = True) -> Any:
        return optimizer.toggle_model(sync_grad=sync) if self.how == "toggle_model" else nullcontext()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        make, judge = self.optimizers()
        noise, real = batch
        target = torch.ones(len(real), 1, dtype=real.dtype)
        loss = nn.functional.binary_cross_entropy_with_logits

        if self.how == "toggle_optimizer":
            self.toggle_optimizer(judge)
        with self.turn(judge):
            if self.how == "neither":
                judge.zero_grad()
            seen = self.generator(noise).detach()
            self.manual_backward(loss(self.judge(real), target) + loss(self.judge(seen), 0 * target))
            self.clip_gradients(judge, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            judge.step()
            if self.how != "neither":
                judge.zero_grad()
        if self.how == "toggle_optimizer":
            self.untoggle_optimizer(judge)
            self.toggle_optimizer(make)

        steps = batch_idx % 2 == 1
        with self.turn(make, sync=steps):  # a window of two backwards; the first need not synchronise
            self.manual_backward(loss(self.judge(self.generator(noise)), target) / 2)
            if steps:
                self.clip_gradients(make, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                make.step()
                make.zero_grad()
        if self.how == "toggle_optimizer":
            self.untoggle_optimizer(make)


def _fit_gan(strategy: Any, root: str, how: str) -> dict[str, Any]:
    module = _Gan(how)
    trainer(strategy, root, precision="64-true", limit_val_batches=0).fit(module)
    return values(module)


@pytest.mark.parametrize(
    ("partition", "how"),
    [
        pytest.param(name, "toggle_model", marks=() if name in ("nnn", "iig", "ggg") else pytest.mark.full)
        for name in SPREAD
    ]
    + [("iig", "toggle_optimizer"), ("iig", "neither")],
)
def test_a_gan_with_two_optimizers_equals_one_process(pool: Pool, tmp_path: Path, partition: str, how: str) -> None:
    expected = _fit_gan("one", str(tmp_path), how)
    for weights in pool.run(_fit_gan, partition, str(tmp_path), how):
        assert_close(weights, expected)


def test_a_gan_with_two_optimizers_equals_ddp(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(_fit_gan, "ddp_find_unused_parameters_true", str(tmp_path), "toggle_optimizer")
    for weights in pool.run(_fit_gan, "iig", str(tmp_path), "toggle_optimizer"):
        assert_close(weights, expected[0])


class _Window(Regressor):
    """Three backwards to a step, every one a boundary, with a checkpoint after the second.

    Args:
        blocked: Whether the first two backwards skip synchronisation.
        last_blocked: Whether the last does too, which is a mistake.
    """

    def __init__(self, blocked: bool, save_to: str, last_blocked: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocked = blocked
        self.last_blocked = last_blocked
        self.save_to = save_to

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 3 == 2
        with optimizer.toggle_model(sync_grad=(last and not self.last_blocked) or not self.blocked):
            self.manual_backward(self.loss(batch) / 3)
        if batch_idx % 3 == 1:
            self.trainer.save_checkpoint(self.save_to)
        if last:
            if isinstance(self.trainer.strategy, ParoStrategy):
                self.seen = self.trainer.strategy.grad_norm().item()
            optimizer.step()
            optimizer.zero_grad()


def _fit_window(strategy: str, root: str, *args: Any) -> tuple[dict[str, Any], float | None]:
    module = _Window(args[0], f"{root}/{strategy}.ckpt", *args[1:])
    trainer(strategy, root, precision="64-true", limit_val_batches=0).fit(module)
    return values(module), getattr(module, "seen", None)


@pytest.mark.parametrize(
    ("partition", "blocked"),
    [
        pytest.param(name, blocked, marks=() if name in chosen else pytest.mark.full)
        for blocked, chosen in ((True, SPREAD), (False, ["nig", "ggg"]))
        for name in ALL
    ],
)
def test_a_checkpoint_inside_a_manual_window_changes_nothing(
    pool: Pool, tmp_path: Path, partition: str, blocked: bool
) -> None:
    expected, _ = _fit_window("one", str(tmp_path), blocked)
    results = pool.run(_fit_window, partition, str(tmp_path), blocked)
    for weights, norm in results:
        assert_close(weights, expected)
        assert norm == results[0][1]


@pytest.mark.parametrize("partition", ["nng", "iig"])
def test_a_step_with_a_window_still_open_says_what_is_missing(pool: Pool, tmp_path: Path, partition: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit_window, partition, str(tmp_path), True, True)
    for message in caught.value.messages():
        assert "AdamW.step() was called while accumulated gradients of unit" in message
        assert "HINT: run the last backward of a window outside `toggle_model(sync_grad=False)`" in message


class _Bare(Regressor):
    """Calls ``loss.backward()`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def _fit_bare(strategy: str, root: str) -> dict[str, Any]:
    module = _Bare()
    trainer(strategy, root, precision="64-true").fit(module)
    return values(module)


@pytest.mark.parametrize("partition", ["nnn", "iig"])
def test_a_bare_backward_is_refused_with_the_remedy(pool: Pool, tmp_path: Path, partition: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit_bare, partition, str(tmp_path))
    for message in caught.value.messages():
        assert "received a gradient outside of a bracketed backward" in message
        assert "`self.manual_backward(loss)`" in message


class _Closure(Regressor):
    """Steps with a closure, twice per batch, on samples of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        optimizer.step(closure=closure)


def _fit_closure(strategy: str, root: str) -> dict[str, Any]:
    module = _Closure()
    trainer(strategy, root, precision="64-true").fit(module)
    return values(module)


@pytest.mark.parametrize("partition", by_default("nig", "ggg", of=["nig", "iig", "ggg"]))
def test_steps_with_a_closure_equal_one_process(pool: Pool, tmp_path: Path, partition: str) -> None:
    expected = _fit_closure("one", str(tmp_path))
    for weights in pool.run(_fit_closure, partition, str(tmp_path)):
        assert_close(weights, expected)
