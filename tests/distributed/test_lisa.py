"""LISA trains what it says, and holds what it says, on one device and under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_paro import state_access
from tests.distributed.lisa import INTERVAL, LAYERS, TABLE, Net, by_hand, rank, train
from tests.distributed.pool import Pool
from tests.distributed.strategies import FullyShards, strategy_of, whole_values

STEPS = 5 * INTERVAL + 1
POLICIES = ["drop_frozen", "reset_all", "offload", "keep"]
OUTSIDE = {"embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}


class Watch(Callback):
    """After every step: whose gradients and whose state there are."""

    def __init__(self) -> None:
        self.states: list[set[str]] = []
        self.gradients: list[set[str]] = []
        self.trained: list[set[str]] = []

    def seen(self) -> list[tuple[set[str], set[str], set[str]]]:
        """By step."""
        return list(zip(self.gradients, self.states, self.trained, strict=True))

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.gradients.append({name for name, p in module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            self.states.append(set(state_access(trainer).optimizer_state(module)))

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index % 2 == 0:
            self.trained.append({name for name, p in module.named_parameters() if p.requires_grad})


def expected(step: int) -> set[str]:
    layers = TABLE[(step // INTERVAL) % len(TABLE)]
    inside = {f"layers.{i}.{name}" for i in layers for name in ("inner.weight", "inner.bias", "outer.weight")}
    return OUTSIDE | inside


class Sharded(FullyShards, Net):
    """For FSDP2."""


def _strategy(name: str) -> dict[str, Any]:
    return strategy_of(name, Sharded)


def _on_ranks(name: str, policy: str, **options: Any) -> Any:
    watch = Watch()
    options = {**_strategy(name), "steps": STEPS, "callbacks": [watch], "state_policy": policy, **options}
    trainer, module, lisa = train(devices=4, **options)
    return whole_values(module), watch.seen()


def _compare(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, value in truth.items():
        close = 1e-10 if value.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(found[name], value, rtol=0, atol=close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("policy", POLICIES)
def test_one_device_equals_one_optimizer_a_layer(policy: str) -> None:
    watch = Watch()
    trainer, module, lisa = train(steps=STEPS, state_policy=policy, callbacks=[watch])
    _compare(whole_values(module), by_hand(STEPS, policy=policy))
    assert [active for _, _, active in lisa.periods] == TABLE
    assert [step for _, step, _ in lisa.periods] == [INTERVAL * k for k in range(6)]
    _check(watch.seen(), policy)
    assert all(p.requires_grad for p in module.parameters())


def _check(seen: list[tuple[set[str], set[str], set[str]]], policy: str) -> None:
    """Gradients exist for what is trained, and state too; where it is dropped, for nothing else, ever."""
    for step, (gradients, states, trained) in enumerate(seen):
        assert gradients == trained == expected(step)
        if policy in ("drop_frozen", "reset_all"):
            assert states == expected(step)
        else:
            assert states == set.union(*(expected(earlier) for earlier in range(step + 1)))


@pytest.mark.parametrize("policy", [POLICIES[0], *(pytest.param(p, marks=pytest.mark.full) for p in POLICIES[1:])])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_torchs_own_strategies_equal_one_optimizer_a_layer(pool: Pool, name: str, policy: str) -> None:
    truth = by_hand(STEPS, policy=policy, dtype=torch.float32 if name == "fsdp2" else torch.float64)
    for found, seen in pool.run(_on_ranks, name, policy):
        _compare(found, truth)
        _check(seen, policy)


def _paro(partitions: tuple[str, ...], policy: str, keep_master: bool) -> Any:
    return [_on_ranks(name, policy, keep_master=keep_master) for name in partitions]


def test_every_partition_equals_one_optimizer_a_layer(pool: Pool, some: tuple[str, ...]) -> None:
    _check_partitions(pool, some, "drop_frozen")


@pytest.mark.full  # with drop_frozen in the test above, and what is kept on the host under one device
@pytest.mark.parametrize("policy", ["offload", *POLICIES[1::2]])
def test_partitions_with_other_policies(pool: Pool, few: tuple[str, ...], policy: str) -> None:
    _check_partitions(pool, few, policy)


def _check_partitions(pool: Pool, partitions: tuple[str, ...], policy: str) -> None:
    truth = by_hand(STEPS, policy=policy)
    for results in pool.run(_paro, partitions, policy, policy == "keep"):
        for found, seen in results:
            _compare(found, truth)
            for step, (gradients, states, trained) in enumerate(seen):
                assert gradients == trained == expected(step)
                if policy in ("drop_frozen", "reset_all"):
                    assert states <= expected(step)  # of a small parameter a rank may have no part


def _ddp_buckets() -> Any:
    sizes: list[int] = []

    class Buckets(Callback):
        def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
            data = trainer.strategy.model._get_ddp_logging_data()
            sizes.append(sum(int(size) for size in data["bucket_sizes"].split(",")))

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index % 2:
                data = trainer.strategy.model._get_ddp_logging_data()
                text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
                sizes.append(sum(int(size) for size in text.split(",")))

    train(devices=4, steps=STEPS, callbacks=[Buckets()], **_strategy("ddp"))
    return sizes


def test_ddp_has_buckets_for_what_is_trained_only(pool: Pool) -> None:
    sizes = {name: p.numel() * 8 for name, p in Net().named_parameters()}
    for found in pool.run(_ddp_buckets):
        at_first, *steps = found
        assert at_first == sum(sizes[name] for name in OUTSIDE)
        assert steps == [sum(sizes[name] for name in expected(step)) for step in range(STEPS)]


class Unequal(Net):
    """Every rank begins with other values; those of rank 0 count."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank())


def _from_unequal() -> Any:
    trainer, module, _ = train(devices=4, steps=4, build=Unequal, **_strategy("ddp"))
    return whole_values(module)


def test_under_ddp_rank_0_begins(pool: Pool) -> None:
    truth = by_hand(4)
    for found in pool.run(_from_unequal):
        _compare(found, truth)


def test_no_layer_is_left_out_of_the_whole() -> None:
    assert len({i for active in TABLE for i in active}) == LAYERS
    assert isinstance(Net().layers, nn.ModuleList)
