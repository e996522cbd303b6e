"""LISA on real GPUs: where moments lie, what memory is taken, that nobody waits, and the same values as on a CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paro import ParoStrategy, state_access
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import OUTSIDE, Save, assert_close, fit, of_layers, values
from tests.distributed.lisa import INTERVAL, TABLE, Net, batches, by_hand, loss_of, train
from tests.distributed.pool import free_port

pytestmark = pytest.mark.gpu

STEPS = 5 * INTERVAL + 1
WIDE, DEEP = 512, 8


class Constant(Net):
    """Sees one batch all the time: a loader begins anew when training is resumed."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0].to(self.device))


def _on_gpu(**options: Any) -> tuple[Trainer, dict[str, Tensor]]:
    trainer, module, _ = train(steps=STEPS, accelerator="gpu", **options)
    return trainer, {name: value.cpu() for name, value in values(module).items()}


@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all", "offload", "keep"])
def test_it_equals_one_optimizer_a_layer(policy: str) -> None:
    assert_close(_on_gpu(state_policy=policy)[1], by_hand(STEPS, policy=policy))


# ---- where moments lie ----------------------------------------------------------------------------------------------


class Places(Callback):
    """After every optimizer step: where the moments of each parameter lie."""

    def __init__(self) -> None:
        self.seen: list[dict[str, set[tuple[str, bool]]]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            states = state_access(trainer).optimizer_state(module)
            self.seen.append({name: {_place(s[key]) for key in MOMENTS} for name, s in states.items()})


MOMENTS = ("exp_avg", "exp_avg_sq")


def _place(tensor: Tensor) -> tuple[str, bool]:
    return tensor.device.type, tensor.is_pinned()


def test_moments_that_sleep_are_pinned_on_the_host_and_come_back_bit_for_bit() -> None:
    """As if they had been kept, in three precisions."""
    for precision in ("64-true", "bf16-true", "bf16-mixed"):
        places = Places()
        _, kept = _on_gpu(state_policy="keep", precision=precision)
        _, offloaded = _on_gpu(state_policy="offload", precision=precision, callbacks=[places])
        assert all(torch.equal(value, offloaded[name]) for name, value in kept.items())
        assert len(places.seen) == STEPS
        for step, where in enumerate(places.seen):
            active = OUTSIDE | of_layers(TABLE[step // INTERVAL])
            assert {name for name, found in where.items() if found == {("cuda", False)}} == active
            assert all(found == {("cpu", True)} for name, found in where.items() if name not in active)


@pytest.mark.parametrize("step", [INTERVAL + 1, 2 * INTERVAL])
@pytest.mark.parametrize("policy", ["drop_frozen", "offload"])
def test_resumed(tmp_path: Path, policy: str, step: int) -> None:
    """Within a period and where one ends, bit for bit."""
    options: dict[str, Any] = {"state_policy": policy, "precision": "32-true", "build": Constant}
    _, whole = _on_gpu(callbacks=[Save(tmp_path / "mid.ckpt", step)], **options)
    _, resumed = _on_gpu(resume=tmp_path / "mid.ckpt", **options)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


# ---- memory ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """With activations that count."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, 4 * WIDE)
        self.down = nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Large(LightningModule):
    """Layers of 8 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEEP))
        self.head = nn.Linear(WIDE, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss = self.head(batch).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


LAYER = sum(parameter.nbytes for parameter in Block().parameters())


def _large(lisa: LISA | None, count: int = 2 * DEEP, *callbacks: Callback, **settings: Any) -> LightningModule:
    data = DataLoader(torch.randn(count, 256, WIDE, generator=torch.Generator().manual_seed(0)), batch_size=None)
    settings = {"accelerator": "gpu", "precision": "32-true", **settings}
    return fit(lisa, build=Large, data=data, callbacks=callbacks, **settings)[1]


class Allocated(Callback):
    """Bytes on the device after every step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.seen.append(torch.cuda.memory_allocated())


def test_memory_does_not_grow_with_the_layers_that_were_trained() -> None:
    """But for what is kept on purpose: two moments of every layer."""
    grown = {}
    for policy in ("drop_frozen", "reset_all", "offload", "keep"):
        allocated = Allocated()
        _large(LISA(1, 2, sampler="cyclic", state_policy=policy), 2 * DEEP, allocated)
        grown[policy] = (allocated.seen[-1] - allocated.seen[1]) / LAYER
    assert grown.pop("keep") == pytest.approx(2 * (DEEP - 1), abs=0.1)
    assert grown == pytest.approx(dict.fromkeys(grown, 0), abs=0.1)


class Peak(Callback):
    """The largest number of bytes on the device from the second period on, in which layers were chosen."""

    def __init__(self, since: int) -> None:
        self.nbytes, self._since = 0, since

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._since + 1:
            torch.cuda.reset_peak_memory_stats()
        self.nbytes = torch.cuda.max_memory_allocated()


def _peak(lisa: LISA) -> int:
    peak = Peak(2)
    _large(lisa, 2 * DEEP, peak)
    return peak.nbytes


@pytest.mark.parametrize("policy", ["drop_frozen", "offload"])
def test_a_memory_is_kept_to_and_made_use_of(policy: Any) -> None:
    first = _peak(LISA(1, 2))  # cuBLAS takes its workspace once
    budget = _peak(LISA(4, 2)) + LAYER
    lisa = LISA(interval=2, memory_budget=budget, sampler="cyclic", state_policy=policy)
    peak = _peak(lisa)
    assert first < peak <= budget
    assert 3 <= lisa.num_layers <= 5


# ---- nobody waits ---------------------------------------------------------------------------------------------------


class Waits(Callback):
    """How often the host waits for the device, which torch warns of, from the second step to the last but one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._caught: Any = None

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            self._caught = warnings.catch_warnings(record=True)
            self._list = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif index == 2 * DEEP - 2:
            self.stop()

    def stop(self) -> None:
        if self._caught is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.texts = [str(w.message) for w in self._list if "synchroniz" in str(w.message)]
            self._caught = None

    def on_exception(self, *_: Any) -> None:
        self.stop()


def _waits(lisa: LISA | None) -> int:
    waits = Waits()
    _large(lisa, 2 * DEEP, waits, gradient_clip_val=1.0)
    return len(waits.texts)


def test_waiting_is_seen_by_this_test() -> None:
    class Reads(Waits):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Tensor, index: int) -> None:
            batch[0, 0].item()

    reads = Reads()
    _large(None, 2 * DEEP, reads)
    assert len(reads.texts) >= 2 * DEEP - 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: LISA(2, 2),
        lambda: LISA(2, 2, state_policy="reset_all", warmup=1),
        lambda: LISA(2, 2, sampler="cyclic", state_policy="keep"),
        lambda: LISA(2, 2, sampler="cyclic", state_policy="offload"),
        lambda: LISA(2, 10**6, sampler="grad_norm"),
    ],
    ids=["drop", "reset and warm up", "keep", "offload", "grad_norm within a period"],
)
def test_the_host_waits_no_more_often_than_without(make: Callable[[], LISA]) -> None:
    """Switches included, unless layers are drawn by norms that are on the device."""
    assert _waits(make()) == _waits(None)


# ---- several --------------------------------------------------------------------------------------------------------


def _posed(rank: int, port: int, partition: str, path: Path) -> None:
    """A rank of two hosts of two ranks, by NCCL's account, on two GPUs."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo",
        NCCL_HOSTID=f"host{rank // 2}", RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
        GROUP_RANK=str(rank // 2), TORCHELASTIC_RUN_ID="posed",
    )  # fmt: skip

    def run(**options: Any) -> dict[str, Tensor]:
        strategy = ParoStrategy(partition, group_size=2)
        _, module, _ = train(strategy, 4, nodes=2, accelerator="gpu", steps=STEPS, **options)
        return {name: value.cpu() for name, value in values(module).items()}

    for policy in ("drop_frozen", "offload"):
        assert_close(run(state_policy=policy), by_hand(STEPS, policy=policy))
    exact = {"state_policy": "offload", "build": Constant, "precision": "32-true"}  # 64-true is read as float32 first
    whole = run(callbacks=[Save(path, INTERVAL + 1)], **exact)
    resumed = run(resume=path, **exact)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("partition", ["nig", "iig", "ggg"])
def test_partitions_on_posed_hosts_equal_one_process(tmp_path: Path, partition: str) -> None:
    torch.multiprocessing.spawn(_posed, (free_port(), partition, tmp_path / "mid.ckpt"), nprocs=4)
