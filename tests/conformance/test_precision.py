"""``Trainer(precision=...)``: what a training_step, the loss curve and a checkpoint see of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from tests.conformance.support import Regressor, load, trainer
from tests.distributed.pool import Pool

SEEN = {  # parameters, matrix products, buffers, checkpoint
    "64-true": (torch.float64,) * 4,
    "bf16-mixed": (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    "bf16-true": (torch.bfloat16,) * 4,
}


class Watched(Regressor):
    """Holds frozen parameters, in the optimizer too, and notes dtypes and losses."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.net.blocks[0].requires_grad_(False)
        self.register_buffer("factor", torch.ones(1))
        self.seen: set[Any] = set()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        inlet = self.net.inlet
        self.seen.add((inlet.weight.dtype, inlet(x).dtype, self.factor.dtype))
        loss = nn.functional.mse_loss(self.net(x * self.factor), y)
        self.losses.append(loss.item())
        return loss


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fit(strategy: str, root: str, **arguments: Any) -> dict[str, Any]:
    module = Watched()
    messages = _Messages()
    logger = rank_zero.log  # of lightning or of pytorch_lightning: whichever was imported last
    logger.addHandler(messages)
    try:
        fitter = trainer(strategy, root, gradient_clip_val=0.5, max_epochs=3, **arguments)
        fitter.fit(module)
        fitter.save_checkpoint(path := f"{root}/{strategy}.ckpt")
        fitter.validate(module, verbose=False)
    finally:
        logger.removeHandler(messages)
    losses = torch.tensor(module.losses)
    if strategy != "one":
        torch.distributed.all_reduce(losses)
        losses /= 4
    frozen = [line for line in messages.lines if "frozen parameters" in line]
    return {"seen": module.seen, "losses": losses.tolist(), "path": path, "frozen": frozen}


@pytest.mark.parametrize("precision", SEEN)
def test_a_precision_by_name(pool: Pool, tmp_path: Path, precision: str) -> None:
    *seen, saved = SEEN[precision]
    results = pool.run(_fit, "iig", str(tmp_path), precision=precision)
    for number, result in enumerate(results):
        assert result["seen"] == {tuple(seen)}
        said = "246 frozen parameters are kept in the compute dtype torch.bfloat16."
        assert result["frozen"] == ([said] if number == 0 and precision == "bf16-mixed" else [])
    checkpoint = load(results[0]["path"])
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {saved}
    (optimizer,) = checkpoint["optimizer_states"]
    assert {state["exp_avg"].dtype for state in optimizer["state"].values()} == {saved}

    alone = _fit("one", str(tmp_path), precision=precision)
    mine, theirs = torch.tensor(results[0]["losses"]), torch.tensor(alone["losses"])
    assert torch.isfinite(mine).all()
    assert theirs[-1] < 0.95 * theirs[0], "nothing was learned"
    tolerance = 1e-6 if precision == "64-true" else 2e-2  # losses are compared in float32
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0)


class Clipped(Regressor):
    """SGD, which a scale of the gradients matters to; fused, but for the oracle: there Lightning refuses to clip."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.losses = [*getattr(self, "losses", []), self.loss(batch)]
        return self.losses[-1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5, fused=self.trainer.world_size > 1)


def _fit_clipped(strategy: str, root: str, limit: float) -> Tensor:
    module = Clipped()
    trainer(strategy, root, precision="bf16-mixed", max_epochs=2, gradient_clip_val=limit).fit(module)
    losses = torch.stack(module.losses).detach()
    if strategy != "one":
        torch.distributed.all_reduce(losses)
        losses /= 4
    return losses


def test_a_fused_optimizer_is_clipped_where_there_is_no_scaler(pool: Pool, tmp_path: Path) -> None:
    mine, *_ = pool.run(_fit_clipped, "iig", str(tmp_path), 0.1)
    oracle, free = (_fit_clipped("one", str(tmp_path), limit) for limit in (0.1, 100.0))
    torch.testing.assert_close(mine, oracle, rtol=2e-2, atol=0)
    assert (free - oracle).abs().max() > 0.1 * oracle.max(), "the limit does not matter"


def test_a_plugin_of_the_users(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(_fit, "nig", str(tmp_path), plugins=[MixedPrecision("bf16-mixed", "cpu")]):
        assert result["seen"] == {SEEN["bf16-mixed"][:3]}


def _fit_fp16(strategy: str, root: str, device: str) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=256.0))
    module = Watched()
    fitter = trainer(
        strategy, root, accelerator=device.replace("cuda", "gpu"), devices=1, plugins=[plugin], max_epochs=3,
        gradient_clip_val=0.5,
    )  # fmt: skip
    fitter.fit(module)
    fitter.save_checkpoint(path := f"{root}/{strategy}.ckpt")
    return {"losses": torch.tensor(module.losses), "seen": module.seen, "checkpoint": load(path)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_16_mixed_follows_a_single_device(tmp_path: Path, device: str) -> None:
    theirs, mine = (_fit_fp16(strategy, str(tmp_path), device) for strategy in ("auto", "paro_iig"))
    assert mine["seen"] == {(torch.float16, torch.float16, torch.float32)}
    assert torch.isfinite(mine["losses"]).all()
    torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=2e-2, atol=0)
    scalers = [result["checkpoint"]["MixedPrecision"] for result in (theirs, mine)]
    assert scalers[0] == scalers[1]
    assert scalers[1]["_growth_tracker"] == 18, "every step was taken"
    dtypes = {value.dtype for value in mine["checkpoint"]["state_dict"].values()}
    assert dtypes == {torch.float32}
