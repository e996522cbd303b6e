"""Precision in numbers: masters below the resolution of the compute dtype, the noise of bf16, dtypes side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_paro.strategies.precision import adopt
from tests.distributed.pool import Pool
from tests.distributed.precision_table import BF16, FP32, FP64, ROWS, Row, lightning_plugin, start
from tests.distributed.sessions import (
    SPREAD,
    Cell,
    Session,
    Setting,
    batch,
    check,
    differing,
    loss_of,
)  # fmt: skip


def _losses(row: Row | None, setting: Setting | None) -> list[float]:
    """30 steps of AdamW on the mean loss of all ranks: with the engine, or with DDP where there is no setting."""
    torch.manual_seed(0)
    module = nn.Sequential(Cell(), Cell())
    rank = torch.distributed.get_rank()
    if setting is not None:
        session, plugin = start(row, setting, module)
        optimizer = session.attach(torch.optim.AdamW(module.parameters(), lr=0.02))
    else:
        plugin = lightning_plugin(row.precision if row else "32-true")
        wrapped = DistributedDataParallel(_WithLoss(module))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses = []
    for step in range(30):
        if setting is not None:
            loss = session.backward(step % 4, context=plugin.forward_context(), dtype=FP32)
        else:
            x, y = batch(step % 4, FP32)
            rows = slice(2 * rank, 2 * rank + 2)
            with plugin.forward_context():
                loss = wrapped(x[rows], y[rows])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().float()
        torch.distributed.all_reduce(loss)
        losses.append(loss.item() / 4)
    if setting is not None:
        session.engine.close()
    return losses


class _WithLoss(nn.Module):
    """What DDP wraps must be called in forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.module, x, y)


def _compare_with_ddp() -> dict[str, list[float]]:
    row = ROWS["bf16-mixed"]
    results = {"fp32": _losses(None, None), "ddp": _losses(row, None)}
    return results | {str(setting): _losses(row, setting) for setting in SPREAD}


def test_bf16_mixed_training_follows_ddp_within_the_noise_of_bf16(pool: Pool) -> None:
    """The noise is measured: what bf16-mixed changes under DDP itself."""
    results = pool.run(_compare_with_ddp)[0]
    curves = {name: torch.tensor(losses) for name, losses in results.items()}
    ddp = curves["ddp"]
    assert ddp[-1] < 0.8 * ddp[0], "nothing was learned"
    noise = (ddp / curves["fp32"] - 1).abs().max()
    assert 1e-5 < noise < 1e-2
    for setting in SPREAD:
        curve = curves[str(setting)]
        assert torch.isfinite(curve).all()
        assert ((curve / ddp - 1).abs() <= 4 * noise).all(), (setting, curve / ddp - 1, noise)
        assert not torch.equal(curve, curves["fp32"])


class Ones(nn.Module):
    """The gradient is one, the value is one, and below it bfloat16 goes down by 2 ** -8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9))
        self.frozen = nn.Parameter(torch.full((5,), 1 + 2**-12), requires_grad=False)

    def forward(self) -> Tensor:
        return self.weight.sum() + self.frozen.sum()


def _sum(module: Ones, x: Tensor, y: Tensor) -> Tensor:
    return module().float()


def _tiny_steps(precision: str, settings: list[Setting]) -> list[dict[str, list[float]]]:
    """By setting: the weight a module sees, and the one that is saved, after 5, 10 and 20 steps of 2e-4."""
    found = []
    for setting in settings:
        session, _ = start(ROWS[precision], setting, Ones(), units="auto")
        optimizer = session.attach(torch.optim.SGD([session.module.weight], lr=2e-4))
        seen: dict[str, list[float]] = {"seen": [], "saved": []}
        for step in range(20):
            session.backward(0, _sum)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 in (5, 10, 20):
                with session.engine.full_parameters(writeback=True):  # which changes nothing must cost nothing
                    seen["seen"] += session.module.weight.tolist()
                with session.engine.lent_to_rank_zero() as here:
                    seen["saved"] += session.module.weight.tolist() if here else []
        session.engine.close()
        assert session.module.weight.dtype is FP32 or precision == "bf16-true"
        seen["closed"] = session.module.weight.tolist()
        seen["frozen"] = session.module.frozen.tolist()
        found.append(seen)
    return found


def test_masters_keep_what_is_below_the_resolution_of_the_compute_dtype(pool: Pool) -> None:
    alone = torch.ones(9, requires_grad=True)
    optimizer = torch.optim.SGD([alone], lr=2e-4)
    exact = []
    for step in range(20):
        alone.grad = torch.ones(9)
        optimizer.step()
        exact += alone.tolist() if step + 1 in (5, 10, 20) else []
    rounded = torch.tensor(exact).bfloat16().tolist()
    assert set(rounded[:9]) == {1.0}
    assert set(rounded[18:]) == {1 - 2**-8}
    settings = SPREAD
    for rank, results in enumerate(pool.run(_tiny_steps, "bf16-mixed", settings)):
        for setting, result in zip(settings, results, strict=True):
            assert result["seen"] == rounded, setting
            assert result["saved"] == (exact if rank == 0 else []), setting
            assert result["closed"] == exact[18:], setting
            assert result["frozen"] == [1.0] * 5, f"{setting}: frozen values have the compute dtype"
    for results in pool.run(_tiny_steps, "bf16-true", settings):
        for result in results:
            assert set(result["seen"]) == {1.0}, "without masters such steps are lost, as in one process"


class Quantised(Cell):
    """Also parameters that are no floats, as quantised weights and masks are, and a float64."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in {"packed": torch.uint8, "index": torch.int64, "mask": torch.bool, "precise": FP64}.items():
            values = torch.arange(37).remainder(2) if dtype is torch.bool else torch.arange(37) * 5
            values = values + 1e-9 if dtype is FP64 else values
            setattr(self, name, nn.Parameter(values.to(dtype), requires_grad=False))
        self.met: list[list[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.met.append([(p.dtype, p.tolist()) for p in (self.packed, self.index, self.mask, self.precise)])
        return super().forward(x)


def _train_quantised(precision: str, settings: list[Setting]) -> None:
    expected = [(p.dtype, p.tolist()) for name, p in Quantised().named_parameters() if p.numel() == 37]
    assert [dtype for dtype, _ in expected] == [torch.uint8, torch.int64, torch.bool, FP64]
    for setting in settings:
        session, plugin = start(ROWS[precision], setting, nn.Sequential(Quantised()))
        (cell,) = session.module
        optimizer = session.attach(torch.optim.SGD([p for p in cell.parameters() if p.requires_grad], lr=0.1))
        for step in range(2):
            session.backward(step, context=plugin.forward_context(), dtype=FP32)
            optimizer.step()
            optimizer.zero_grad()
        session.engine.close()
        assert cell.met == [expected] * 2, setting
        assert [(p.dtype, p.tolist()) for p in (cell.packed, cell.index, cell.mask, cell.precise)] == expected, setting


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_that_autocast_leaves_alone_are_sharded_and_gathered_unchanged(
    pool: Pool, some: tuple[str, ...], precision: str
) -> None:
    pool.run(_train_quantised, precision, list(map(Setting, some)))


def _train_unfrozen(settings: list[Setting]) -> None:
    """Frozen parameters that the optimizer holds cost no master until they are trained."""
    for setting in settings:
        session, _ = start(ROWS["bf16-mixed"], setting, Ones(), units="auto")
        frozen = next(flat for flat in session.engine.flats if not flat.trainable)
        assert session.engine.rounded_frozen() == 5
        optimizer = session.attach(torch.optim.SGD(session.module.parameters(), lr=1e-4))
        assert frozen.nbytes()["master"] == 0
        for step in range(4):
            session.module.frozen.requires_grad_(step > 1)
            session.backward(0, _sum)
            optimizer.step()
            optimizer.zero_grad()
        assert frozen.nbytes()["master"] == frozen.numel * 4 // session.engine.topology.divisor(frozen.partition.os)
        session.engine.close()
        exact = torch.ones(())  # what the compute dtype has made of it
        for _ in range(2):
            exact -= 1e-4 * torch.ones(())
        assert session.module.frozen.tolist() == [exact.item()] * 5, setting


def test_frozen_parameters_get_a_master_on_all_ranks_once_they_are_trained(pool: Pool, some: tuple[str, ...]) -> None:
    """Five elements of two groups of two: two ranks hold no slice of them, and must take part all the same."""
    pool.run(_train_unfrozen, list(map(Setting, some)))


class Several(nn.Module):
    """Float dtypes side by side in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Cell().to(dtype) for dtype in (FP64, FP32, BF16))


def _several_loss(module: Several, x: Tensor, y: Tensor) -> Tensor:
    return sum(loss_of(part, x.to(part.weight.dtype), y.to(part.weight.dtype)).double() for part in module.parts)


def _train_several(number: int, session: Session) -> dict[str, Any]:
    parameters = list(nn.ModuleList(session.module.parts[:number]).parameters())
    optimizer = session.attach(torch.optim.SGD(parameters, lr=0.1, momentum=0.5))
    plugin = adopt(Precision())
    plugin.engine = session.engine
    norms = []
    for step in range(3):
        session.backward(step, _several_loss)
        if session.engine is None:
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.5))
        else:
            norms.append(session.engine.grad_norm(optimizer))
            plugin.clip_gradients(optimizer, 0.5)
        optimizer.step()
        session.module.zero_grad()
    if session.engine is not None:
        session.engine.close()
    values = {f"{i} {name}": p.detach().double() for i, part in enumerate(session.module.parts[:number])
              for name, p in part.named_parameters()}  # fmt: skip
    return {"norms": torch.stack(norms).double(), **values}


@pytest.mark.parametrize(("number", "tolerance"), [(1, 1e-10), (2, 1e-6), (3, 2e-2)])  # by the widest noise among them
def test_float_dtypes_side_by_side_train_and_clip_as_in_one_process(pool: Pool, number: int, tolerance: float) -> None:
    settings = [*SPREAD, Setting("gig", 4), Setting("ggg", 1)]
    check(pool.run(differing, partial(_train_several, number), Several, settings, tolerance))
