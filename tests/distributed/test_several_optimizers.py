"""Two optimizers in turn, each with its part of one module, as in a GAN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.loops import SOME, Alone, Block, Sharded, Stack, adamw, assert_as_alone, share
from tests.distributed.pool import Pool


class Player(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Game(nn.Module):
    """First and last layers of both players lie in one unit, the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Player(6)
        self.critic = Player(1)
        self.double()

    def generator_loss(self, noise: Tensor) -> Tensor:
        return nn.functional.softplus(-self.critic(self.generator(noise))).mean()

    def critic_loss(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return (nn.functional.softplus(self.critic(fake)) + nn.functional.softplus(-self.critic(real))).mean()


@contextmanager
def only(optimizer: torch.optim.Optimizer, model: Game, toggle: bool) -> Iterator[None]:
    """As Lightning's toggle_optimizer: the other player's parameters do not require a gradient."""
    other = model.critic if optimizer.defaults["lr"] == 1e-2 else model.generator
    if toggle:
        other.requires_grad_(False)
    yield
    other.requires_grad_(True)


def _game(loop: Alone, toggle: bool, micro_batches: int = 1) -> nn.Module:
    model = Game()
    loop.shard(model)
    for_generator = loop.attach(torch.optim.AdamW(model.generator.parameters(), lr=1e-2, eps=1e-6))
    for_critic = loop.attach(torch.optim.AdamW(model.critic.parameters(), lr=2e-2, eps=1e-6))
    for step in range(2):
        for micro in range(micro_batches):
            sync = micro == micro_batches - 1
            with loop.step(manual=True):
                with only(for_generator, model, toggle):
                    if micro == 0:
                        for_generator.zero_grad()
                    loop.backward(
                        loop.mean(lambda rank, s=step, m=micro: model.generator_loss(share(s, rank, m))), sync=sync
                    )
                    if sync:
                        loop.clip(for_generator, 0.1)
                        for_generator.step()
                with only(for_critic, model, toggle):
                    if micro == 0:
                        for_critic.zero_grad()
                    loop.backward(
                        loop.mean(
                            lambda rank, s=step, m=micro: model.critic_loss(share(s, rank, m), share(s, rank, 5 + m))
                        ),
                        sync=sync,
                    )
                    if sync:
                        for_critic.step()
    return model


def _toggled(loop: Alone) -> nn.Module:
    return _game(loop, toggle=True)


def _not_toggled(loop: Alone) -> nn.Module:
    return _game(loop, toggle=False)


def _toggled_with_accumulation(loop: Alone) -> nn.Module:
    return _game(loop, toggle=True, micro_batches=3)


def _not_toggled_with_accumulation(loop: Alone) -> nn.Module:
    """The generator's backward leaves gradients on the critic as well, in one process too."""
    return _game(loop, toggle=False, micro_batches=2)


def _steps_after_all_backwards(loop: Alone) -> nn.Module:
    """The critic's gradient must survive the generator's backward, in which the critic is frozen."""
    model = Game()
    loop.shard(model)
    for_generator = loop.attach(torch.optim.AdamW(model.generator.parameters(), lr=1e-2, eps=1e-6))
    for_critic = loop.attach(torch.optim.SGD(model.critic.parameters(), lr=2e-2, momentum=0.9))
    for step in range(2):
        for_generator.zero_grad()
        for_critic.zero_grad()
        with loop.step(manual=True):
            with only(for_critic, model, True):
                loop.backward(loop.mean(lambda rank, s=step: model.critic_loss(share(s, rank), share(s, rank, 1))))
            for micro in range(2):
                with only(for_generator, model, True):
                    loop.backward(loop.mean(lambda rank, s=step, m=micro: model.generator_loss(share(s, rank, 2 + m))))
        for_critic.step()
        for_generator.step()
    return model


@pytest.mark.parametrize(
    "scenario",
    [
        _toggled,
        _not_toggled,
        _toggled_with_accumulation,
        _not_toggled_with_accumulation,
        _steps_after_all_backwards,
    ],
)
def test_two_optimizers_in_turn_equal_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


def _norm_of_two(loop: Alone) -> nn.Module:
    """Two optimizers hold the same parameters: their gradients count once."""
    model = loop.shard(Stack().double())
    for _ in range(2):
        loop.attach(adamw(model))
    with loop.step():
        loss = loop.mean(lambda rank: model(share(0, rank)).square().mean())
    loop.backward(loss)
    norm = float(loop.engine.grad_norm()) if isinstance(loop, Sharded) else loop.norm(adamw(model))
    held = nn.Module()
    held.register_buffer("norm", torch.tensor(norm, dtype=torch.float64))
    return held


def test_the_norm_counts_a_parameter_of_two_optimizers_once(pool: Pool) -> None:
    assert_as_alone(pool, _norm_of_two, SOME)


class Probed(Stack):
    """A head beside the model's own, both in the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(8, 1)
        self.double()


def _one_forward_for_two(loop: Alone) -> nn.Module:
    """One optimizer steps before the backward of the other, through weights that lie beside those that moved."""
    model = loop.shard(Probed())
    probing = loop.attach(torch.optim.SGD(model.probe.parameters(), lr=0.1))
    training = loop.attach(torch.optim.SGD([p for n, p in model.named_parameters() if "probe" not in n], lr=0.1))
    for step in range(3):
        hidden: list[Tensor] = []

        def loss(rank: int, s: int = step, kept: list[Tensor] = hidden) -> Tensor:
            x = model.first(share(s, rank))
            for block in model.blocks:
                x = block(x)
            kept.append(x)
            return model.last(x).square().mean()

        with loop.step(manual=True):
            main = loop.mean(loss)
            probe = loop.mean(lambda rank, kept=hidden: model.probe(kept[rank % len(kept)].detach()).square().mean())
            probing.zero_grad()
            loop.backward(probe)
            probing.step()
            training.zero_grad()
            loop.backward(main)
            training.step()
    return model


def test_a_step_voids_only_graphs_of_what_it_moved(pool: Pool) -> None:
    assert_as_alone(pool, _one_forward_for_two, SOME)
