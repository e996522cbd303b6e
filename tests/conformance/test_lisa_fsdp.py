"""LISA under FSDPStrategy, one unit a layer: as one process, and what it cannot do is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_paro import state_access
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Save
from tests.conformance.support import by_default
from tests.distributed.lisa import INTERVAL, LR, TABLE, Layer, Net, batches, by_hand, loss_of, table, train
from tests.distributed.pool import Pool, WorkerError

STEPS = 10


class _Cpu:
    """What FSDP takes for a device; without one it looks for a GPU."""

    type, index = "cpu", torch.device("cpu")


class OnCpu(FSDPStrategy):
    """FSDPStrategy on gloo, which Lightning refuses only of the class itself."""

    _wrapping = False

    @property
    def root_device(self) -> Any:
        return _Cpu if self._wrapping else super().root_device

    def _setup_model(self, model: Any) -> Any:
        self._wrapping = True
        try:
            return super()._setup_model(model)
        finally:
            self._wrapping = False


class Sharded(Net):
    """Keeps its whole values before everything is torn down."""

    def __init__(self, constant: bool = False) -> None:
        super().__init__()
        self.constant = constant
        self.whole: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0] if self.constant else batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=LR, eps=1e-5)  # type: ignore[union-attr]
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_end(self) -> None:
        with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model, writeback=False):
            self.whole = {_proper(name): p.detach().clone() for name, p in self.named_parameters()}


class NeverBuilt(Sharded):
    def configure_optimizers(self) -> Any:
        raise AssertionError("it came to optimizers")


def _proper(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


class Asleep(Callback):
    """After every step: layers that have state or gradients here."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        states = state_access(trainer).optimizer_state(module)
        names = {*states, *(name for name, p in module.named_parameters() if p.grad is not None)}
        self.seen.append({int(name.split(".")[1]) for name in names if name.startswith("layers")})


def _fit(**options: Any) -> tuple[Any, LISA]:
    strategy = OnCpu(auto_wrap_policy={Layer}, process_group_backend="gloo", state_dict_type="sharded")
    constant = options.pop("constant", False)
    settings = {"steps": STEPS, "clip": None, "precision": "32-true", "build": lambda: Sharded(constant), **options}
    _, module, lisa = train(strategy, 4, **settings)
    return module, lisa


def _trained(policy: str) -> tuple[dict[str, Tensor], list[set[int]], int]:
    asleep = Asleep()
    module, lisa = _fit(state_policy=policy, accumulate=1, callbacks=[asleep])
    return module.whole, asleep.seen, lisa.trainable


@pytest.mark.parametrize("policy", by_default("drop_frozen", of=["drop_frozen", "reset_all", "offload", "keep"]))
def test_it_equals_one_process(pool: Pool, policy: str) -> None:
    truth = by_hand(STEPS, 1, clip=None, policy=policy, dtype=torch.float32)
    for whole, seen, trainable in pool.run(_trained, policy):
        for name, value in truth.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert trainable == 337  # of the whole model, not of this rank's part
        for step, layers in enumerate(seen):
            active = set(TABLE[step // INTERVAL])
            if policy in ("drop_frozen", "reset_all"):
                assert layers <= active
                assert layers


def _drawn(sampler: str) -> list[Any]:
    return _fit(accumulate=1, sampler=sampler, interval=1)[1].periods


def test_layers_are_weighed_whole(pool: Pool) -> None:
    _, _, alone = train(steps=STEPS, accumulate=1, clip=None, sampler="weight_norm", interval=1)
    for periods in pool.run(_drawn, "weight_norm"):
        assert periods == alone.periods


def _budgeted(budget: int) -> int:
    return _fit(accumulate=1, sampler="uniform", memory_budget=budget)[1].num_layers


def test_a_budget_is_that_of_a_rank(pool: Pool) -> None:
    layer, outside = 6 * 7 + 7 + 7 * 6, 11 * 6 + 2 * 6 + 6 * 11 + 11
    needed = 4 * (outside + 5 * layer) + 12 * (outside + 3 * layer)
    assert pool.run(_budgeted, needed // 4 + 3) == [3] * 4
    assert pool.run(_budgeted, needed // 4 - 3) == [2] * 4


@pytest.mark.parametrize(
    ("options", "told"), [({"sampler": "grad_norm"}, 'sampler="grad_norm"'), ({"warmup": 1}, "warmup=1")]
)
def test_what_needs_to_know_the_parts_is_refused(pool: Pool, options: dict[str, Any], told: str) -> None:
    """Before anything is built."""
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit, build=NeverBuilt, **options)
    for message in caught.value.messages():
        assert f"LISA({told}) needs to know" in str(message)
        assert f"HINT: ModelParallelStrategy or Trainer(strategy='paro_ggg'), or leave {told} out." in str(message)


def _resumed(path: Path, policy: str, step: int) -> None:
    options = {"accumulate": 1, "constant": True, "state_policy": policy, "sampler": table}
    whole, first = _fit(callbacks=[Save(path, step)], **options)
    resumed, second = _fit(resume=path, **options)
    assert first.periods == second.periods
    for name, value in whole.whole.items():
        assert torch.equal(value, resumed.whole[name]), name


@pytest.mark.parametrize("policy", by_default("drop_frozen", of=["drop_frozen", "keep"]))
@pytest.mark.parametrize("step", [INTERVAL + 1, pytest.param(2 * INTERVAL, marks=pytest.mark.full)])
def test_resumed(pool: Pool, tmp_path: Path, policy: str, step: int) -> None:
    """From shards: torch cannot put whole ones together on a CPU."""
    pool.run(_resumed, tmp_path / "mid.ckpt", policy, step)
