"""Clipping by norm and by value, as Lightning's plugins call it, equals one process in every combination."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from torch import Tensor, nn

from lightning_paro.strategies.precision import adopt
from tests.distributed.pool import Pool
from tests.distributed.sessions import SPREAD, Bank, Session, Setting, check, differing, loss_of, start


def bank() -> Bank:
    return Bank(["by norm", "by value", "unused"]).double()


def _loss(module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(module["by norm"], x, y) + 3 * loss_of(module["by value"], x, y)


def _plugin(session: Session) -> Precision:
    """Lightning's own in one process, ours on shards."""
    if session.engine is None:
        return DoublePrecision()
    plugin = adopt(DoublePrecision())
    plugin.engine = session.engine
    return plugin


def _train(session: Session) -> dict[str, Any]:
    """Two optimizers, clipped each in its own way; one of them also holds parameters without a gradient."""
    module, plugin = session.module, _plugin(session)
    one = session.attach(torch.optim.SGD([*module["unused"].parameters(), *module["by norm"].parameters()], lr=0.1))
    two = session.attach(torch.optim.AdamW(module["by value"].parameters(), lr=0.1))
    norms = []
    for step in range(3):
        session.backward(step, _loss)
        if session.engine is None:
            shown = [[p.grad for p in o.param_groups[0]["params"] if p.grad is not None] for o in (one, two)]
            norms += [nn.utils.get_total_norm(gradients) for gradients in (*shown, shown[0] + shown[1])]
        else:
            norms += [session.engine.grad_norm(which) for which in (one, two, None)]
        assert norms[-3] > 0.2, "clipping would not act"
        plugin.clip_gradients(one, 0.2, "norm")
        plugin.clip_gradients(two, 0.05, "value")
        if step == 2:  # what is below the limit stays as it is
            plugin.clip_gradients(one, 100.0, "norm")
            plugin.clip_gradients(two, 100.0, "value")
            plugin.clip_gradients(one, 0.0, "norm")
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": torch.stack(norms), **session.values()}


@pytest.mark.parametrize("group_size", [4, 2, 1])
def test_clipping_per_optimizer_equals_one_process_in_every_partition(
    pool: Pool, some: tuple[str, ...], group_size: int
) -> None:
    settings = [Setting(partition, group_size) for partition in some]
    check(pool.run(differing, _train, bank, settings))


def _zero(session: Session) -> dict[str, Any]:
    """Gradients of zero, and none at all."""
    module, plugin = session.module, _plugin(session)
    optimizer = session.attach(torch.optim.SGD([module["by norm"].weight], lr=0.1, momentum=0.5))
    number = session.attach(torch.optim.SGD([module["by norm"].scale], lr=0.1))  # most ranks hold nothing of it
    session.backward(0, _nothing)
    for algorithm in ("norm", "value"):
        plugin.clip_gradients(optimizer, 0.5, algorithm)
    norm = session.engine.grad_norm() if session.engine is not None else torch.zeros((), dtype=torch.float64)
    for which in (optimizer, number):
        which.step()
        which.zero_grad()
    if session.engine is not None:  # which torch refuses in one process
        for algorithm in ("norm", "value"):
            plugin.clip_gradients(optimizer, 0.5, algorithm)
    session.backward(0, _loss)
    plugin.clip_gradients(number, 0.1, "value")
    number.step()
    return {"norm": norm, **session.values()}


def _nothing(module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return 0 * _loss(module, x, y)


def test_clipping_nothing_does_no_harm(pool: Pool) -> None:
    check(pool.run(differing, _zero, bank, SPREAD))


def _norms(setting: Setting, spoiled: float) -> list[float]:
    session = start(bank, setting)
    optimizer = session.attach(torch.optim.SGD(session.module.parameters(), lr=0.1))
    session.backward(0, partial(_spoiled, spoiled if session.rank == 2 else 1.0))
    norm = session.engine.grad_norm(optimizer)
    _plugin(session).clip_gradients(optimizer, 0.5, "norm")
    gradients = [entry.grad for entry in session.engine.optimizers[0].entries() if entry.grad is not None]
    left = sum(bool(torch.isfinite(gradient).all() and gradient.any()) for gradient in gradients)
    session.engine.close()
    return [norm.item(), left]


def _spoiled(factor: float, module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return _loss(module, x, y) * factor


def test_the_norm_is_the_same_on_all_ranks_and_not_finite_if_any_gradient_is(pool: Pool) -> None:
    for setting in SPREAD:
        norms = {norm for norm, _ in pool.run(_norms, setting, 1.0)}
        assert len(norms) == 1, setting
        for bad in (float("nan"), float("inf")):
            for norm, left in pool.run(_norms, setting, bad):
                assert norm != norm or norm == float("inf"), (setting, norm)
                assert left == 0, "as with torch's own clipping, nothing finite and not zero is left to step with"
