"""Which layers are drawn: the same on all ranks, without a word between them, and nobody else's numbers change."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paro.algorithms.sampling import Draw, scored
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Silent, fit
from tests.conformance.support import by_default
from tests.distributed.lisa import Net, batches, rank, train
from tests.distributed.pool import Pool
from tests.distributed.test_lisa import _strategy

SAMPLERS = ["uniform", "cyclic", "weight_norm", "grad_norm"]


class Noisy(Net):
    """Draws from all global generators in every step; begins with other ones on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, float, float]] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.drawn.append((torch.rand(()).item(), float(np.random.rand()), random.random()))
        return super().training_step(batch, index)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("policy", ["drop_frozen", pytest.param("offload", marks=pytest.mark.full)])
def test_the_global_generators_are_left_alone(sampler: Any, policy: Any) -> None:
    _, without = fit(None, build=Noisy)
    periods = []
    for seed in (0, 1):
        lisa = LISA(interval=1, sampler=sampler, seed=seed, state_policy=policy)
        _, module = fit(lisa, build=Noisy)
        assert module.drawn == without.drawn
        periods.append([active for _, _, active in lisa.periods])
    assert len(set(without.drawn)) == 8
    assert periods[0] != periods[1]  # and draws depend on the seed


def test_draws_do_not_depend_on_the_global_seed() -> None:
    periods = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        lisa = LISA(interval=1, seed=3)
        fit(lisa, Net())
        periods.append(lisa.periods)
    assert periods[0] == periods[1]


class Differ(Callback):
    """Every rank's global generators are somewhere else."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        torch.manual_seed(rank())
        np.random.seed(rank())
        random.seed(rank())


class Counted(Callback):
    """Collectives by name, of the hooks of LISA that switch."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._kept: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Comes before LISA's."""
        for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather", "barrier"):
            self._kept[name] = getattr(dist, name)

            def counted(*args: Any, _name: str = name, **kwargs: Any) -> Any:
                self.calls[_name] += 1
                return self._kept[_name](*args, **kwargs)

            setattr(dist, name, counted)

    def stop(self) -> None:
        for name, function in self._kept.items():
            setattr(dist, name, function)


class Stop(Callback):
    """Comes after LISA."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.counted.stop()


def _draws(strategy: str, sampler: Any) -> tuple[list[Any], dict[str, int]]:
    counted = Counted()
    callbacks = [Differ(), Stop(counted)]
    options = _strategy(strategy)
    build = options.pop("build", Net)
    _, _, lisa = train(
        devices=4, steps=6, accumulate=1, interval=1, sampler=sampler, callbacks=callbacks,
        build=lambda: _with_callback(build(), counted), **options,
    )  # fmt: skip
    return lisa.periods, dict(counted.calls)


def _with_callback(net: LightningModule, callback: Callback) -> LightningModule:
    """The net, with ``callback`` ahead of all others when a batch starts."""

    class First(type(net)):  # type: ignore[misc]
        def on_fit_start(self) -> None:
            self.trainer.callbacks.insert(0, callback)

    net.__class__ = First
    return net


@pytest.mark.parametrize("strategy", by_default("ddp", "ggg", of=["ddp", "fsdp2", "nig", "ggg"]))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_ranks_draw_the_same(pool: Pool, strategy: str, sampler: str) -> None:
    _, _, alone = train(steps=6, accumulate=1, interval=1, sampler=sampler)
    results = pool.run(_draws, strategy, sampler)
    assert results[0][0] == alone.periods
    for periods, calls in results:
        assert periods == results[0][0]
        assert len(periods) == 6
        if sampler in ("uniform", "cyclic"):
            assert calls == {}, "nothing is sent to know what is trained"
        else:
            assert calls.get("broadcast_object_list") == 5  # the first draw comes before


def _own_seeds() -> tuple[list[Any], int]:
    _, _, lisa = train("ddp", 4, steps=6, accumulate=1, interval=1, sampler="uniform", seed=100 + rank())
    return lisa.periods, lisa.seed


def test_rank_0_says_the_seed(pool: Pool) -> None:
    """Where ranks come with seeds of their own."""
    _, _, alone = train(steps=6, accumulate=1, interval=1, sampler="uniform", seed=100)
    assert pool.run(_own_seeds) == [(alone.periods, 100)] * 4


class PerRank:
    """A sampler that does not agree with itself: rank 0's word counts."""

    def __call__(self, ask: Draw) -> Sequence[int]:
        return random.Random(100 * rank() + ask.period).sample(range(ask.size), ask.num_layers)


def test_a_sampler_of_the_users_own_need_not_agree(pool: Pool) -> None:
    results = [periods for periods, _ in pool.run(_draws, "ddp", PerRank())]
    assert results == [results[0]] * 4
    expected = [tuple(sorted(random.Random(period).sample(range(5), 2))) for period in range(6)]
    assert [active for _, _, active in results[0]] == expected


class Asked:
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Draw] = []

    def __call__(self, ask: Draw) -> Sequence[int]:
        self.asked.append(ask)
        return [ask.period % ask.size]


@pytest.mark.parametrize("policy", ["drop_frozen", "offload"])
def test_a_sampler_is_asked_once_a_period(policy: Any) -> None:
    asked = Asked()
    fit(LISA(num_layers=1, interval=2, sampler=asked, seed=7, state_policy=policy), accumulate_grad_batches=1)
    assert asked.asked == [Draw(period, 5, 1, 7) for period in range(4)]


class Biased(Net):
    """Layer 4 is much heavier than the others, and the loss hardly depends on layer 0."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.layers[4].parameters():
                parameter.mul_(50)
        nn.init.zeros_(self.layers[0].outer.weight)


def test_heavier_layers_are_drawn_more_often() -> None:
    lisa = LISA(num_layers=1, interval=1, sampler="weight_norm")
    fit(lisa, build=Biased, count=40)
    counts = Counter(active[0] for _, _, active in lisa.periods)
    assert counts[4] > 30


def test_a_draw_by_weights_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    net = Net().double()
    norms = [torch.cat([p.flatten() for p in layer.parameters()]).norm().item() for layer in net.layers]
    lisa = LISA(num_layers=2, interval=9, sampler="weight_norm", seed=5)
    fit(lisa)
    assert lisa.periods[0][2] == tuple(sorted(scored(Draw(0, 5, 2, 5), norms)))


def test_a_layer_with_another_name_before_is_weighed() -> None:
    class Aliased(Biased):
        def __init__(self) -> None:
            super().__init__()
            layers = self.layers
            del self.layers
            self.first = layers[4]
            self.layers = layers

    lisa = LISA(num_layers=1, interval=1, sampler="weight_norm")
    fit(lisa, build=Aliased, count=40)
    assert Counter(active[0] for _, _, active in lisa.periods)[lisa.names.index("layers.4")] > 30


def test_steps_without_a_gradient_say_nothing_of_norms() -> None:
    class Skips(Silent):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index == 0 else super().training_step(batch, index)

    norms = []
    for build, count in ((Skips, 2), (Silent, 1)):
        lisa = LISA(num_layers=5, interval=50, sampler="grad_norm")
        fit(lisa, build=build, data=DataLoader(batches(1) * count, batch_size=None))
        norms.append(lisa._norms.scores())
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.parametrize("argument", ["train_head", "train_embeddings"])
@pytest.mark.parametrize("when", ["never", "sampled"])
def test_what_is_not_found_cannot_be_left_out(argument: str, when: str) -> None:
    class Headless(Net):
        def __init__(self) -> None:
            super().__init__()
            head, layers = self.head, self.layers
            del self.head, self.layers, self.embedding
            self.embedding = Looked()
            self.head, self.layers = head, layers

    what = argument.removeprefix("train_")
    with pytest.raises(ValueError, match=f"{argument}='{when}', but nothing trainable was found that is {what}.* HINT"):
        fit(LISA(**{argument: when}), build=Headless)  # type: ignore[arg-type]


class Looked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(11, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]
