"""16-mixed: one scale and one verdict on all ranks. On a CPU by a plugin: Lightning makes the flag bf16-mixed there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler

from lightning_paro.strategies.precision import adopt, policy_for
from tests.distributed.comparing import differences
from tests.distributed.pool import Pool
from tests.distributed.sessions import SPREAD, Bank, Cell, Session, Setting, batch, check, loss_of

SETTINGS = [Setting("iig"), Setting("nnn"), Setting("gig", 4), Setting("iii", 1)]
NAMES = ("good", "bad")
BAD_STEPS = (2, 5)


class Spoiled(Cell):
    """Multiplies the gradient of one number, which lies in the shard of one rank; that of the others is finite."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * 1
        if scale.requires_grad:
            scale.register_hook(lambda gradient: gradient * self.factor)
        return torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias)) * scale


def _optimizers(module: Bank, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "fused":  # unscales inside its step
        return [torch.optim.AdamW(module[name].parameters(), lr=0.01, eps=1e-4, fused=True) for name in NAMES]
    return [torch.optim.SGD(module[name].parameters(), lr=0.2, momentum=0.5) for name in NAMES]


def _train(kind: str, setting: Setting | None) -> dict[str, Any]:
    """Eight steps, in two of which rank 2 spoils a gradient of the second optimizer, and the shard of one rank."""
    given = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", given)
    torch.manual_seed(0)
    module = Bank(["good"])
    module.cells["bad"] = spoiled = Spoiled()
    if setting is None:
        session, scaler = Session(module), given
    else:
        plugin = adopt(plugin)
        session, scaler = Session(module, setting, policy=policy_for(plugin)), plugin.scaler
        plugin.engine = session.engine
    optimizers = [session.attach(optimizer) for optimizer in _optimizers(module, kind)]
    scales, verdicts = [], []
    for step in range(8):
        bad = step in BAD_STEPS and (setting is None or session.rank == 2)
        # One process computes in float32: what is compared is the verdict, and the values within the noise of fp16.
        context = plugin.forward_context() if setting is not None else None
        spoiled.factor = float("inf") if bad else 1.0
        session.backward(step, partial(_scaled, scaler), context=context, dtype=torch.float32)
        for optimizer in optimizers:
            if kind != "fused":
                scaler.unscale_(optimizer)
                plugin.clip_gradients(optimizer, 2.0)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
        with session.full():
            verdicts += [module[name].weight.sum().item() for name in NAMES]
    values = session.values()
    moved = [[verdicts[i] != verdicts[i - 2] for i in range(start, 16, 2)] for start in (2, 3)]
    return {"scales": scales, "moved": moved, "values": values}


def _scaled(scaler: GradScaler, module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return scaler.scale(loss_of(module, x, y).float())


def _differing(kind: str) -> list[str]:
    expected = _train(kind, None)
    assert expected["scales"] == [256, 512, 256, 256, 512, 256, 256, 512]
    assert expected["moved"] == [[True] * 7, [step not in BAD_STEPS for step in range(1, 8)]]
    found = []
    for setting in SETTINGS:
        result = _train(kind, setting)
        wrong = [f"{key}: {result[key]}" for key in ("scales", "moved") if result[key] != expected[key]]
        wrong += differences(result["values"], expected["values"], 2e-2)
        found += [f"{setting}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize("kind", ["unscaled first", "fused"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(pool: Pool, kind: str) -> None:
    check(pool.run(_differing, kind))


def _without_entries(setting: Setting) -> list[Any]:
    """An optimizer of a single number, which one rank holds at most."""
    plugin = adopt(MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0)))
    torch.manual_seed(0)
    session = Session(Bank(["a"]), setting, policy=policy_for(plugin))
    plugin.engine = session.engine
    optimizer = session.attach(torch.optim.SGD([session.module["a"].scale], lr=0.1))
    held = len(list(session.engine.optimizers[0].entries())) if session.engine is not None else 1
    for step in range(2):
        factor = float("nan") if step == 1 and session.rank == 0 else 1.0
        loss = partial(_of_one, plugin.scaler, factor)
        session.backward(step, loss, context=plugin.forward_context(), dtype=torch.float32)
        plugin.scaler.unscale_(optimizer)
        plugin.scaler.step(optimizer)
        optimizer.zero_grad()
        plugin.scaler.update()
    session.engine.close()
    return [held, plugin.scaler.get_scale(), session.module["a"].scale.item()]


def _of_one(scaler: GradScaler, factor: float, module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return scaler.scale(factor * loss_of(module, x, y).float())


def test_a_rank_whose_optimizer_holds_nothing_takes_part(pool: Pool) -> None:
    torch.manual_seed(0)
    module = Bank(["a"])
    loss_of(module, *batch(0, torch.float32)).backward()
    expected = (module["a"].scale - 0.1 * module["a"].scale.grad).item()
    for setting in SPREAD:
        held, scales, values = zip(*pool.run(_without_entries, setting), strict=True)
        assert sum(held) == (4 if setting.partition == "nnn" else 1), setting
        assert scales == (32.0,) * 4, setting
        assert len(set(values)) == 1
        assert values[0] == pytest.approx(expected, rel=1e-2), setting
