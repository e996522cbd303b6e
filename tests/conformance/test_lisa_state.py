"""What public code does not hold to: optimizer state is that of what is trained, in every step of a hundred periods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import OUTSIDE, Watch, assert_close, fit, of_layers, values
from tests.conformance.support import by_default
from tests.distributed.lisa import INTERVAL, TABLE, Layer, Net, batches, by_hand, loss_of, table, train
from tests.distributed.pool import Pool

DEPTH, PERIODS = 12, 100

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


class Deep(Net):
    """Twelve layers; two param groups."""

    def __init__(self, kind: str = "adam") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.kind = kind

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batch)

    def configure_optimizers(self) -> Any:
        vectors = [p for p in self.parameters() if p.ndim == 1]
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return OPTIMIZERS[self.kind]([{"params": matrices}, {"params": vectors}])


def _check(watch: Watch, lisa: LISA, steps: int = PERIODS) -> None:
    assert len(lisa.periods) == steps
    assert {index for _, _, active in lisa.periods for index in active} == set(range(DEPTH))
    for step, (_, _, active) in enumerate(lisa.periods):
        assert len(active) == 2
        assert watch.gradients[step] == watch.trained[step] == watch.states[step] == OUTSIDE | of_layers(active)


@pytest.mark.parametrize("kind", by_default("adam", "momentum", "adafactor", of=list(OPTIMIZERS)))
def test_state_is_that_of_what_is_trained(kind: str) -> None:
    watch, lisa = Watch(), LISA(interval=1, sampler="uniform")
    trainer, _ = fit(lisa, build=lambda: Deep(kind), callbacks=[watch], count=PERIODS)
    _check(watch, lisa)
    assert len(trainer.optimizers[0].state) == len(OUTSIDE) + 2 * 3  # of anything, named or not


def test_what_public_code_does_is_seen_by_this_test() -> None:
    """With state kept it comes to be that of all."""
    watch, lisa = Watch(), LISA(interval=1, state_policy="keep")
    fit(lisa, build=Deep, callbacks=[watch], count=PERIODS)
    assert watch.states[-1] == {name for name, _ in Deep().named_parameters()}
    with pytest.raises(AssertionError):
        _check(watch, lisa)


def test_reset_state_has_made_one_step() -> None:
    class Ages(Callback):
        def __init__(self) -> None:
            self.seen: list[set[float]] = []

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            self.seen.append({state["step"].item() for state in trainer.optimizers[0].state.values()})

    ages = {policy: Ages() for policy in ("reset_all", "drop_frozen")}
    for policy, seen in ages.items():
        fit(LISA(interval=3, state_policy=policy, sampler="cyclic"), build=Deep, callbacks=[seen], count=12)  # type: ignore[arg-type]
    assert ages["reset_all"].seen == [{1.0}, {2.0}, {3.0}] * 4
    assert [max(seen) for seen in ages["drop_frozen"].seen] == [float(step) for step in range(1, 13)]  # of embeddings
    assert [min(seen) for seen in ages["drop_frozen"].seen] == [1.0, 2.0, 3.0] * 4


# ---- an optimizer that is sharded by itself -------------------------------------------------------------------------


class Zero(Net):
    """ZeroRedundancyOptimizer inside of DDP: every rank has the state of some parameters."""

    def __init__(self, constant: bool = False) -> None:
        super().__init__()
        self.constant = constant

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0] if self.constant else batch)

    def configure_optimizers(self) -> Any:
        optimizer = ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Inner(Callback):
    """Number of parameters that this rank's part of the optimizer has state of, after every step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, batch: Any, *args: Any) -> None:
        if args[-1] % 2:
            self.seen.append(len(trainer.optimizers[0].optim.state))


def _zero(policy: str) -> tuple[dict[str, Tensor], list[int]]:
    inner = Inner()
    _, module, _ = train("ddp", 4, steps=16, build=Zero, callbacks=[inner], state_policy=policy)
    return values(module), inner.seen


@pytest.mark.parametrize("policy", by_default("drop_frozen", of=["drop_frozen", "reset_all", "keep"]))
def test_zero_redundancy_under_ddp(pool: Pool, policy: str) -> None:
    results = pool.run(_zero, policy)
    truth = by_hand(16, policy=policy)
    for found, _ in results:
        assert_close(found, truth)
    together = [sum(held) for held in zip(*(seen for _, seen in results), strict=True)]
    if policy == "keep":
        assert together[-1] == len(OUTSIDE) + 5 * 3
    else:
        assert together == [len(OUTSIDE) + 2 * 3] * 16


class SaveAll(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == INTERVAL + 1:
            trainer.save_checkpoint(self.path)


def _zero_resumed(path: Path) -> None:
    options: dict[str, Any] = {"steps": 11, "accumulate": 1, "build": lambda: Zero(constant=True), "sampler": table}
    options["precision"] = "32-true"
    _, whole, _ = train("ddp", 4, callbacks=[SaveAll(path)], **options)
    _, resumed, lisa = train("ddp", 4, resume=path, **options)
    assert [active for _, _, active in lisa.periods] == TABLE[:4]
    for name, value in values(whole).items():
        assert torch.equal(value, resumed.get_parameter(name)), name


def test_zero_redundancy_resumed(pool: Pool, tmp_path: Path) -> None:
    pool.run(_zero_resumed, tmp_path / "mid.ckpt")
