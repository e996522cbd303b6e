"""Masks that change are the same on every rank, and under every strategy what they are in training by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.dynamic import Rule
from lightning_paro.callbacks import SparseMask
from tests.conformance.lisa_runs import Save
from tests.distributed.pool import Pool
from tests.distributed.strategies import FullyShards, strategy_of, whole_values
from tests.distributed.supar import CLIP, DECAY, LR, Net, Plain, batches, loss_of, train

STEPS, EVERY, DROP, DENSITY = 9, 2, 0.4, 0.3
END = 6  # of 9 steps, 0.75
SPARSE = [f"layers.{layer}.{name}.weight" for layer in range(3) for name in ("up", "down")]


def dynamic(rule: Rule) -> SparseMask:
    """RigL with the masks of a plan, pruning without one."""
    if rule == "rigl":
        return SparseMask(dynamic="rigl", every=EVERY, drop_fraction=DROP)
    return SparseMask(DENSITY, dynamic="gmp", every=EVERY)


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], close: float = 1e-10) -> None:
    for name, value in truth.items():
        assert (found[name] - value).abs().max() <= close, name


def by_hand(rule: Rule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and masks after the same training in plain torch, in float64, with two micro-batches a step."""
    torch.manual_seed(0)
    net = Net() if rule == "rigl" else Plain()
    names = dict(net.double().named_parameters())
    if isinstance(net, Net):
        plan = net.supar_plan
        assert plan is not None
        masks = {name: plan.mask(name) for name in SPARSE}
        groups = [
            {"params": [p], "lr": LR * plan[n].lr_factor, "weight_decay": DECAY * plan[n].weight_decay_factor}
            for n, p in names.items()
        ]
        optimizer = torch.optim.AdamW(groups, eps=1e-5)
    else:
        masks = {name: torch.ones_like(names[name], dtype=torch.bool) for name in SPARSE}
        optimizer = torch.optim.AdamW(names.values(), lr=LR)
    rates = [group["lr"] for group in optimizer.param_groups]
    data = iter(batches(STEPS * 2))
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            (loss_of(net, next(data)) / 2).backward()
        for name, mask in masks.items():
            if 0 < step <= END and step % EVERY == 0:
                masks[name] = _next(rule, names[name], mask, step)
                changed = masks[name] != mask
                for tensor in (names[name].data, *list(optimizer.state[names[name]].values())[1:]):
                    tensor[changed] = 0
            names[name].grad[~masks[name]] = 0  # type: ignore[index]
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.9 * step / 20) if rule == "rigl" else rate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in names.items()}, masks


def _next(rule: Rule, parameter: nn.Parameter, mask: Tensor, step: int) -> Tensor:
    """By sorting Python's numbers."""
    weight, living = parameter.detach().flatten().abs().tolist(), mask.flatten().nonzero().flatten().tolist()
    living.sort(key=lambda place: weight[place])
    if rule == "gmp":
        kept = living[len(living) - round((DENSITY + (1 - DENSITY) * (1 - step / END) ** 3) * mask.numel()) :]
    else:
        assert parameter.grad is not None
        count = round(DROP / 2 * (1 + math.cos(math.pi * step / END)) * len(living))
        slope = parameter.grad.flatten().abs().tolist()
        others = set(range(mask.numel())) - set(living[count:])
        kept = living[count:] + sorted(others, key=lambda place: -slope[place])[:count]
    new = torch.zeros(mask.numel(), dtype=torch.bool)
    new[kept] = True
    return new.view(mask.shape)


class Sharded(FullyShards, Net):
    """For FSDP2."""


class PlainSharded(FullyShards, Plain):
    """For FSDP2, without a plan."""


def _on_ranks(rule: Rule, names: tuple[str, ...]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Under each strategy: values and masks."""
    found = []
    for name in names:
        settings: dict[str, Any] = {"build": Net if rule == "rigl" else Plain, "steps": STEPS}
        settings |= strategy_of(name, Sharded if rule == "rigl" else PlainSharded)
        mask = dynamic(rule)
        _, module = train(devices=4, callbacks=[mask], **settings)
        assert mask.masks is not None
        found.append((whole_values(module), {key: mask.masks.mask(module, key) for key in SPARSE}))
    return found


OTHERS = ("nnn", "nni", "nii", "nig", "ngg", "iii", "igg")


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("rigl", ("ddp", "fsdp2", "nng", "iig", "ggg")), ("gmp", ("fsdp2", "iig")),
        pytest.param("rigl", OTHERS, marks=pytest.mark.full),
        pytest.param("gmp", ("ddp", "nng", "ggg", *OTHERS), marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_every_strategy_equals_training_by_hand(pool: Pool, rule: Rule, names: tuple[str, ...]) -> None:
    truth, masks = by_hand(rule)
    for results in pool.run(_on_ranks, rule, names):
        for name, (found, kept) in zip(names, results, strict=True):
            assert all(torch.equal(mask, masks[key]) for key, mask in kept.items()), name
            assert_close(found, truth, 1e-5 if name == "fsdp2" else 1e-10)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class PlainConstant(Plain):
    """One batch all the time, so that it does not matter where a loader begins."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0])


class Constant(PlainConstant, Net):
    """The same, with a plan."""


class ShardedConstant(FullyShards, Constant):
    pass


class PlainShardedConstant(FullyShards, PlainConstant):
    pass


def _resumed(rule: Rule, name: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    built = (Constant, ShardedConstant) if rule == "rigl" else (PlainConstant, PlainShardedConstant)

    def run(*callbacks: Any, **options: Any) -> dict[str, Tensor]:
        settings = {"build": built[0], **strategy_of(name, built[1]), "precision": "32-true", "accumulate": 1}
        mask = dynamic(rule)
        _, module = train(devices=4, steps=STEPS, callbacks=[mask, *callbacks], **settings, **options)
        assert mask.masks is not None
        return whole_values(module) | {f"{key}_mask": mask.masks.mask(module, key) for key in SPARSE}

    return run(Save(path, 4)), run(resume=path)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("rigl", "ggg"),
        *(pytest.param("rigl", name, marks=pytest.mark.full) for name in ("ddp", "fsdp2", "nig")),
        *(pytest.param("gmp", name, marks=pytest.mark.full) for name in ("ddp", "fsdp2", "nig", "ggg")),
    ],
)  # fmt: skip
def test_resumed_training_is_the_same_to_the_bit(pool: Pool, tmp_path: Path, name: str, rule: Rule) -> None:
    for whole, resumed in pool.run(_resumed, rule, name, tmp_path / "mid.ckpt"):
        for key, value in whole.items():
            assert torch.equal(value, resumed[key]), key
