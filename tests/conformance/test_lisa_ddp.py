"""LISA under DDP: right with each of its options, lean, and nothing is left of the wrappers of earlier periods."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import OUTSIDE, Silent, assert_close, of_layers, quiet, values
from tests.distributed.lisa import TABLE, Layer, Net, batches, by_hand, rank, table, train
from tests.distributed.pool import Pool

STEPS = 10


def _values(options: dict[str, Any], **settings: Any) -> dict[str, Tensor]:
    _, module, _ = train(DDPStrategy(**options), 4, steps=STEPS, **settings)
    return values(module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"find_unused_parameters": False},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.0001},
    ],
    ids=str,
)
def test_with_each_option_it_equals_one_process(pool: Pool, options: dict[str, Any]) -> None:
    truth = by_hand(STEPS)
    for found in pool.run(_values, options):
        assert_close(found, truth)


# ---- nothing is left ------------------------------------------------------------------------------------------------


class Traces(Callback):
    """Wrappers and reducers there have been, and collectives of each step."""

    def __init__(self) -> None:
        self.wrappers: list[weakref.ref[Any]] = []
        self.reducers: list[weakref.ref[Any]] = []
        self.collectives: list[int] = []
        self.alive: list[int] = []
        self._before = 0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        wrapper = trainer.strategy.model
        if not self.wrappers or self.wrappers[-1]() is not wrapper:
            self.wrappers.append(weakref.ref(wrapper))
            self.reducers.append(weakref.ref(wrapper.reducer))  # type: ignore[union-attr]
        self._before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.collectives.append(dist.group.WORLD._get_sequence_number_for_group() - self._before)  # type: ignore[union-attr]
        if len(self.collectives) % 21 == 0:
            self.alive.append(_wrappers())


def _wrappers() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())


def _twenty_switches(options: dict[str, Any]) -> tuple[list[bool], list[bool], list[int], list[int], int]:
    traces = Traces()
    before = _wrappers()
    train(
        DDPStrategy(**options), 4, steps=3 * 21, accumulate=1, callbacks=[traces], sampler="uniform", build=Silent,
    )  # fmt: skip
    return (
        [wrapper() is not None for wrapper in traces.wrappers[:-1]],
        [reducer() is not None for reducer in traces.reducers[:-1]],
        traces.collectives,
        [alive - before for alive in traces.alive],
        len(traces.wrappers),
    )


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": True}, pytest.param({"find_unused_parameters": True}, marks=pytest.mark.full)],
    ids=str,
)
def test_twenty_switches_leave_nothing_behind(pool: Pool, options: dict[str, Any]) -> None:
    """A hook that stayed on a parameter would keep its reducer, and reduce once more."""
    for wrappers, reducers, collectives, alive, count in pool.run(_twenty_switches, options):
        assert count == 21
        assert not any(wrappers)
        assert not any(reducers)
        assert alive == [1] * 3
        periods = [collectives[start : start + 3] for start in range(0, 63, 3)]
        assert periods == [periods[0]] * 21


# ---- what Lightning adds --------------------------------------------------------------------------------------------


class Hooked(DDPStrategy):
    """Lightning registers hooks on GPUs only; this does so here."""

    sent: list[int]

    def _register_ddp_hooks(self) -> None:
        self.sent = vars(self).get("sent", [])

        def hook(state: Any, bucket: Any) -> Any:
            self.sent.append(bucket.buffer().numel())
            return allreduce_hook(state, bucket)

        hook.__annotations__ = dict(allreduce_hook.__annotations__)  # DDP looks at them
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, hook)


def _hooked() -> tuple[dict[str, Tensor], list[int]]:
    strategy = Hooked()
    _, module, _ = train(strategy, 4, steps=STEPS, accumulate=1)
    return values(module), strategy.sent


def test_a_communication_hook_stays(pool: Pool) -> None:
    truth = by_hand(STEPS, 1)
    sizes = {name: p.numel() for name, p in Net().named_parameters()}
    for found, sent in pool.run(_hooked):
        assert_close(found, truth)
        assert sent == [sum(sizes[n] for n in OUTSIDE | of_layers(TABLE[step // 3])) for step in range(STEPS)]


class Normed(Net):
    """With running statistics in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.BatchNorm1d(4)) for _ in range(5))


def _normed() -> dict[str, Tensor]:
    _, module, _ = train(DDPStrategy(), 4, steps=STEPS, build=Normed)
    module.eval()
    return values(module) | {name: buffer.clone() for name, buffer in module.named_buffers() if rank() == 0}


def test_layers_with_buffers(pool: Pool) -> None:
    """Rank 0's statistics are sent before each forward, of frozen layers as well."""
    results = pool.run(_normed)
    first = results[0]
    assert sum("running_mean" in name for name in first) == 5
    assert all(first[name].abs().sum() > 0 for name in first if "running_mean" in name)
    for found in results[1:]:
        for name, value in found.items():
            assert torch.equal(value, first[name]), name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_synchronised_statistics() -> None:
    results = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Normed().double()
        strategy: Any = DDPStrategy(start_method="spawn") if devices > 1 else "auto"
        trainer = quiet(
            callbacks=[LISA(interval=2, sampler=table)], accelerator="gpu", devices=devices, strategy=strategy,
            sync_batchnorm=True,
        )  # fmt: skip
        trainer.fit(module, Halves(8, devices))
        results.append({name: value.cpu() for name, value in module.state_dict().items()})
    assert_close(results[1], results[0])


class Halves(torch.utils.data.DataLoader):  # type: ignore[type-arg]
    """Every rank its part of each batch."""

    def __init__(self, count: int, devices: int) -> None:
        super().__init__(batches(count), batch_size=None)  # type: ignore[arg-type]
        self.devices = devices

    def __iter__(self) -> Any:
        return (batch.chunk(self.devices)[rank() % self.devices] for batch in super().__iter__())
