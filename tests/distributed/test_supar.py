"""Masked training under every strategy equals the same training by hand, and nothing masked ever lives."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_paro import state_access
from lightning_paro.callbacks import SparseMask
from tests.conformance.lisa_runs import Save
from tests.distributed.pool import Pool
from tests.distributed.strategies import FullyShards, strategy_of, whole_values
from tests.distributed.supar import Net, Plain, Thawing, batches, by_hand, loss_of, train


class Sharded(FullyShards, Net):
    """For FSDP2."""


class Living(Callback):
    """After every step: names of parameters of which something masked is not zero on this rank."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.kept = 0

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        guard = next(c for c in trainer.callbacks if isinstance(c, SparseMask))  # type: ignore[attr-defined]
        self.kept = sum(dropped.numel() for dropped in guard._dropped.values())
        for name, shard in state_access(trainer).trainable_shards().items():
            if name in module.supar_plan.sparse:
                mask = module.supar_plan.mask(name).flatten()[shard.offset : shard.offset + shard.value.numel()]
                tensors = [shard.value, *(v for v in shard.state.values() if isinstance(v, Tensor) and v.numel() > 1)]
                if any(tensor.flatten()[~mask].any() for tensor in tensors):
                    self.found.append(name)


def _on_ranks(name: str, **options: Any) -> tuple[dict[str, Tensor], list[str], int]:
    living = Living()
    _, module = train(devices=4, callbacks=[living], **{**strategy_of(name, Sharded), **options})
    return whole_values(module), living.found, living.kept


def _compare(found: dict[str, Tensor], truth: dict[str, Tensor], close: float) -> None:
    for name, value in truth.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=close, check_dtype=False, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_device_equals_training_by_hand() -> None:
    living = Living()
    _, module = train(callbacks=[living])
    _compare(whole_values(module), by_hand(), 1e-10)
    assert not living.found
    assert not living.kept or living.kept == sum(module.supar_plan.mask(n).numel() for n in module.supar_plan.sparse)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_torchs_own_strategies_equal_training_by_hand(pool: Pool, name: str) -> None:
    for found, living, _ in pool.run(_on_ranks, name):
        _compare(found, by_hand(), 1e-5 if name == "fsdp2" else 1e-10)
        assert not living


def _partitions(names: tuple[str, ...]) -> list[Any]:
    return [_on_ranks(name) for name in names]


def test_every_partition_equals_training_by_hand(pool: Pool, some: tuple[str, ...]) -> None:
    truth = by_hand()
    total = sum(Net().supar_plan.mask(name).numel() for name in Net().supar_plan.sparse)  # type: ignore[union-attr]
    for results in pool.run(_partitions, some):
        for name, (found, living, kept) in zip(some, results, strict=True):
            _compare(found, truth, 1e-10)
            assert not living, name
            parts = {"n": 1, "i": 2, "g": 4}[name[2]]
            assert kept <= total / parts + 200, name  # of its own part only


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["ddp", "iig", pytest.param("ggg", marks=pytest.mark.full)])
def test_nothing_masked_lives_in_other_precisions(pool: Pool, name: str, precision: str) -> None:
    plan = Net().supar_plan
    assert plan is not None
    for found, living, kept in pool.run(_on_ranks, name, precision=precision):
        assert kept
        assert not living
        for key in plan.sparse:
            assert not found[key][~plan.mask(key)].any(), key
            assert found[key][plan.mask(key)].any(), key


def _disagreeing(what: str) -> str:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    callbacks = [SparseMask(0.5, dynamic="rigl", every=1 + rank)] if what == "every" else []
    build = Plain if what == "every" else lambda: Net(seed=rank)
    with pytest.raises(ValueError, match="ranks disagree") as caught:
        train(devices=4, build=build, callbacks=callbacks, **strategy_of("ddp", Net))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seed", "ranks disagree on SparseMask's masks: .* on rank 0, .* on rank 1. HINT: build the model and"),
        (
            "every",
            r"ranks disagree on SparseMask's dynamic masks: \('rigl', 1, .* on rank 0, \('rigl', 2, .* on rank 1",
        ),
    ],
)
def test_ranks_that_disagree_are_refused(pool: Pool, what: str, message: str) -> None:
    for told in pool.run(_disagreeing, what):
        assert re.search(message, told), told


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class Constant(Net):
    """One batch all the time, so that it does not matter where a loader begins."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0])


class ShardedConstant(Constant, Sharded):
    pass


def _resumed(name: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def run(**options: Any) -> dict[str, Tensor]:
        settings = {"build": Constant, **strategy_of(name, ShardedConstant), "precision": "32-true", "accumulate": 1}
        return whole_values(train(devices=4, **settings, **options)[1])

    return run(callbacks=[Save(path, 3)]), run(resume=path)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "nig", "ggg"])
def test_resumed_training_is_the_same_to_the_bit(pool: Pool, tmp_path: Path, name: str) -> None:
    for whole, resumed in pool.run(_resumed, name, tmp_path / "mid.ckpt"):
        for key, value in whole.items():
            assert torch.equal(value, resumed[key]), key
    if name == "fsdp2":  # a folder of shards
        return
    checkpoint = torch.load(tmp_path / "mid.ckpt", weights_only=False)
    plan = Net().supar_plan
    assert plan is not None
    for key in plan.sparse:
        assert torch.equal(checkpoint["state_dict"][f"{key}_mask"], plan.mask(key))
    assert checkpoint["supar_plan"] == plan.to_dict()


def _thawed(names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    found = []
    for name in names:
        mask = SparseMask(0.5, exclude=("down", "layers.0", "layers.2"))  # of the rest some ranks hold nothing
        ranks = {"devices": 4, **strategy_of(name, Sharded)} if name else {}
        _, module = train(build=Thawing, callbacks=[mask], **ranks)
        found.append(whole_values(module))
    return found


def test_ranks_that_hold_nothing_of_what_is_unfrozen_go_on(pool: Pool) -> None:
    (truth,) = _thawed(("",))
    assert 100 < int((truth["layers.1.up.weight"] == 0).sum()) < 110
    for results in pool.run(_thawed, ("nng", "ggg")):
        for found in results:
            _compare(found, truth, 1e-10)
