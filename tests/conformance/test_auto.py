"""``paro_auto``: the planner's choice on every rank, found out behind the training's back and kept with it."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torchmetrics import MeanMetric

from lightning_paro import ParoStrategy, Topology
from lightning_paro.planner import Measured, Network, Plan, Probe, Sample, StateBytes, Workload, _cache, make_plan
from tests.conformance.support import Net, Regressor, assert_equal, load, rank, samples, trainer, values
from tests.distributed.pool import WORLD_SIZE, Pool, WorkerError

INTRA, INTER, COLUMN, RING = 4e9, 1e8, 5e7, 2e8  # bytes per second
GIVEN = {"compute": 0.0, "activations": 1e4}
ROOMY = {"memory": 1e9}
CHOICES = {1e9: "nng", 40_000: "nig", 35_000: "iig", 32_000: "igg", 29_000: "ggg"}
"""What is best for :class:`_Deep`, by the memory of a rank, with the numbers given."""


@contextmanager
def _network(cache: str, intra: float = INTRA, inter: float = INTER, column: float = COLUMN) -> Iterator[mock.Mock]:
    """What a probe would measure; the mock counts how often one did."""
    links = {"inside": intra, "between, one column": inter, "between, all columns": column, "all, one flat ring": RING}
    found = tuple(Sample(name, "gather", 2**20, 2**19 / speed, speed) for name, speed in links.items())
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),
        mock.patch.object(_cache, "probe", return_value=Probe(Topology(WORLD_SIZE, 2), "cpu", found)) as probe,
    ):
        yield probe


def _auto(**options: Any) -> ParoStrategy:
    return ParoStrategy("auto", group_size=2, bucket_bytes=0, **options)


def _expect(pool: Pool, pattern: str, function: Any, *args: Any, **kwargs: Any) -> None:
    """An error with this text on every rank."""
    with pytest.raises(WorkerError) as caught:
        pool.run(function, *args, **kwargs)
    for message in caught.value.messages():
        assert re.search(pattern, message or "", re.DOTALL), message


# ---- the choice -----------------------------------------------------------------------------------------------------


class _Deep(Regressor):
    """Blocks enough that two of them are little beside the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(depth=12)


def _fit(root: str, options: dict[str, Any], module: type[Regressor] = _Deep, **arguments: Any) -> tuple[str, Plan]:
    with _network(root):
        arguments = {"max_steps": 1, "limit_val_batches": 0, "accumulate_grad_batches": 2} | arguments
        run = trainer(_auto(**options), root, **arguments)
        run.fit(module())
        plan = run.strategy._auto.plan
        assert run.strategy.partition == plan.recommended.partition
        return str(run.strategy.partition), plan


def _by_hand(memory: float) -> Plan:
    net = _Deep().net
    total, block = (sum(parameter.numel() for parameter in part.parameters()) for part in (net, net.blocks[0]))
    workload = Workload(total, total, 2, 0.0, 1e4, total - 12 * block, block, StateBytes.of("32-true"), 0)
    return make_plan(workload, Network(Topology(WORLD_SIZE, 2), INTER, INTRA, column=COLUMN, ring=RING), memory)


@pytest.mark.parametrize("memory", CHOICES)
def test_every_rank_takes_what_an_independent_plan_recommends(pool: Pool, tmp_path: Path, memory: float) -> None:
    expected = _by_hand(memory)
    for name, plan in pool.run(_fit, str(tmp_path), GIVEN | {"memory": memory}):
        assert name == str(expected.recommended.partition) == CHOICES[memory]
        assert plan == expected


@pytest.mark.parametrize(
    ("precision", "options"),
    [("64-true", {}), ("bf16-true", {}), ("bf16-mixed", {}), ("bf16-mixed", {"grad_dtype": "bfloat16"})],
)
def test_the_bytes_are_those_of_the_precision(
    pool: Pool, tmp_path: Path, precision: str, options: dict[str, str]
) -> None:
    for _, plan in pool.run(_fit, str(tmp_path), GIVEN | ROOMY | options, precision=precision):
        assert plan.workload.sizes == StateBytes.of(precision, **options)


def test_scheduled_accumulation_counts_as_it_begins(pool: Pool, tmp_path: Path) -> None:
    schedule = GradientAccumulationScheduler({0: 3, 2: 5})
    for _, plan in pool.run(_fit, str(tmp_path), GIVEN | ROOMY, accumulate_grad_batches=1, callbacks=[schedule]):
        assert plan.workload.accumulate == 3


def test_equally_fast_partitions_are_told_apart_by_memory(pool: Pool, tmp_path: Path) -> None:
    for name, plan in pool.run(_fit, str(tmp_path), {"compute": 10.0, "activations": 0} | ROOMY):
        assert name == "ggg"
        assert {row.cost.step_s for row in plan.rows} == {20.0}


class _HalfTrained(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks.requires_grad_(False)


def test_frozen_parameters_have_no_gradients(pool: Pool, tmp_path: Path) -> None:
    for _, plan in pool.run(_fit, str(tmp_path), GIVEN | ROOMY, _HalfTrained):
        workload = plan.workload
        assert workload.trainable == workload.rest == workload.parameters - 2 * workload.largest_unit


def test_what_is_not_given_is_measured_and_the_same_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(_fit, str(tmp_path), {})
    assert all(result == results[0] for result in results)
    _, plan = results[0]
    rows = 8 // WORLD_SIZE
    net = rows * (5 + 12 * (7 + 2 + 7 + 15) + 7)  # of a block: input, mean and scale of the norm; inputs of both layers
    loss = rows * (3 + 3)
    assert plan.workload.activations == 4 * (net + loss)
    assert 0 < plan.workload.compute < 60
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    assert available is not None
    assert 0.2 < plan.memory / (int(available[1]) * 1024 / WORLD_SIZE) < 5


def test_a_number_that_is_given_is_not_measured(pool: Pool, tmp_path: Path) -> None:
    for _, plan in pool.run(_fit, str(tmp_path), {"activations": 123, "compute": 4.0} | ROOMY):
        assert (plan.workload.activations, plan.workload.compute) == (123, 4.0)
    for _, plan in pool.run(_fit, str(tmp_path), {"activations": 123} | ROOMY):
        assert plan.workload.activations == 123
        assert 0 < plan.workload.compute < 60


def _messages(root: str, **options: Any) -> list[str]:
    said: list[str] = []
    with mock.patch("lightning_paro.strategies._auto.rank_zero_info", said.append):
        _fit(root, GIVEN | options)
    return said


def test_the_table_and_the_reason_are_logged(pool: Pool, tmp_path: Path) -> None:
    (said,) = pool.run(_messages, str(tmp_path), memory=35_000.0)[0]
    assert all(f"paro_{row.partition}" in said for row in _by_hand(35_000).rows)
    assert "Of 14 partitions 4 fit in the 3.5e-05 GB" in said
    assert "paro_iig is the fastest of these:" in said
    assert "A micro-batch computes for 0 s with 1e-05 GB of activations" in said


# ---- nothing of the training notices --------------------------------------------------------------------------------


class _Noted(Dataset):
    """Augments with three random generators."""

    def __init__(self) -> None:
        self.data = samples()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 1e-2 * (random.random() + np.random.rand()) + 1e-2 * torch.rand(5), y


class _Everything(Regressor):
    """Random numbers of all kinds, buffers, a counter, a metric, a log and a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.mean = nn.BatchNorm1d(5), nn.Dropout(0.3), MeanMetric()
        self.generator = torch.Generator().manual_seed(5)
        self.calls: list[int] = []
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.drop(self.norm(batch[0])) * (1 + np.random.rand() + random.random()), batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(self.trainer.global_step)
        self.seen.append(batch[0].sum().item())
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"calls": float(len(self.calls)), "mean": self.mean})
        self.logger.log_metrics({"direct": float(len(self.calls))}, step=len(self.calls))
        batch.clear()  # a step may do with its batch what it likes
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Noted(), batch_size=4, shuffle=True, generator=self.generator, collate_fn=_as_list)


def _as_list(rows: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _train_everything(strategy: str, root: str) -> dict[str, Any]:
    """With the sampler of the user, so that all ranks draw the same indices from the user's generator."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    module, logger = _Everything(), CSVLogger(root, version=0)
    memory = {"memory": 1e5} if strategy == "auto" else {}
    with _network(root) as probe:
        run = trainer(
            ParoStrategy(strategy, group_size=2, **memory),
            root,
            logger=logger,
            log_every_n_steps=1,
            max_epochs=2,
            use_distributed_sampler=False,
            limit_val_batches=0,
            accumulate_grad_batches=2,
        )
        run.fit(module)
        assert probe.call_count == (strategy == "auto")
    return {
        "partition": str(run.strategy.partition),
        "weights": values(module),
        "calls": module.calls,
        "seen": module.seen,
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "progress": run.fit_loop.state_dict(),
        "random": [torch.rand(1).item(), random.random(), np.random.rand()],
        "generator": module.generator.get_state().tolist(),
    }


def test_training_is_bit_for_bit_that_of_the_partition_by_name(pool: Pool, tmp_path: Path) -> None:
    auto = pool.run(_train_everything, "auto", str(tmp_path / "auto"))
    (partition,) = {result["partition"] for result in auto}
    named = pool.run(_train_everything, partition, str(tmp_path / "named"))
    for ours, theirs in zip(auto, named, strict=True):
        assert len(ours["calls"]) == 24
        assert ours.keys() == theirs.keys()
        assert_equal(ours.pop("weights"), theirs.pop("weights"))
        assert ours == theirs
    logged = [next((tmp_path / run).rglob("metrics.csv")).read_text() for run in ("auto", "named")]
    assert logged[0] == logged[1]
    assert "direct" in logged[0]


# ---- kept with the training -----------------------------------------------------------------------------------------


def _resume(root: str, options: dict[str, Any], resumed: str | None = None, inter: float = INTER) -> dict[str, Any]:
    """Fit one epoch more than the checkpoint has; slow links between hosts, or fast ones."""
    with _network(f"{root}/{inter}", inter=inter, column=inter) as probe:
        epochs = 1 if resumed is None else 2
        run = trainer(_auto(**options), root, max_epochs=epochs, limit_val_batches=0, accumulate_grad_batches=2)
        run.fit(_Deep(), ckpt_path=resumed)
        path = f"{root}/{'first' if resumed is None else 'second'}.ckpt"
        run.save_checkpoint(path)
        weights = f"{root}/weights.ckpt"
        run.save_checkpoint(weights, weights_only=True)
    kept = [torch.load(file, weights_only=True)["lightning_paro"] for file in (path, weights)]
    assert kept[0] == kept[1]
    return {"partition": str(run.strategy.partition), "kept": kept[0], "probes": probe.call_count}


TIGHT, LOOSE = GIVEN | {"memory": 29_000}, GIVEN | {"memory": 1e9}


def test_the_choice_is_in_every_checkpoint_and_kept_on_resume(pool: Pool, tmp_path: Path) -> None:
    for result in pool.run(_resume, str(tmp_path), LOOSE):
        assert result["partition"] == result["kept"]["partition"] == "nng"
        assert result["kept"] == {"partition": "nng", "world_size": 4, "group_size": 2, "training": True}
        assert result["probes"] == 1
    # now neither the network nor the memory would have it chosen, and nothing is measured
    for result in pool.run(_resume, str(tmp_path), TIGHT, f"{tmp_path}/first.ckpt", inter=1e12):
        assert result["partition"] == result["kept"]["partition"] == "nng"
        assert result["probes"] == 0
    for result in pool.run(_resume, str(tmp_path), TIGHT | {"reprobe": True}, f"{tmp_path}/first.ckpt"):
        assert result["partition"] == result["kept"]["partition"] == "ggg"
        assert result["probes"] == 1, "the network as well, though it was known"


def _damaged(root: str, reprobe: bool) -> str:
    path = f"{root}/first.ckpt"
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["lightning_paro"] = {"partition": "nng", "of_another": "version"}
    mine = f"{root}/{torch.distributed.get_rank()}{reprobe}.ckpt"
    torch.save(checkpoint, mine)
    try:
        return _resume(root, LOOSE | {"reprobe": reprobe}, mine)["partition"]
    except ValueError as error:
        return str(error)


def test_a_choice_that_this_version_cannot_read_is_told_and_can_be_made_anew(pool: Pool, tmp_path: Path) -> None:
    pool.run(_resume, str(tmp_path), LOOSE)
    for told in pool.run(_damaged, str(tmp_path), False):
        assert told.startswith("the checkpoint's 'lightning_paro' is {'partition': 'nng', 'of_another': 'version'}")
        assert told.endswith("HINT: ParoStrategy('auto', reprobe=True) decides anew.")
    assert pool.run(_damaged, str(tmp_path), True) == ["nng"] * WORLD_SIZE


def _one_process(root: str) -> int:
    module = _Deep()
    run = trainer("one", root, max_epochs=2, accumulate_grad_batches=2)
    run.fit(module, ckpt_path=f"{root}/first.ckpt")
    return run.global_step


def test_a_checkpoint_is_one_that_other_strategies_continue(pool: Pool, tmp_path: Path) -> None:
    pool.run(_resume, str(tmp_path), LOOSE)
    assert _one_process(str(tmp_path)) == 6
    assert set(load(tmp_path / "first.ckpt")) - {"lightning_paro"} == set(_plain_checkpoint(tmp_path))


def _plain_checkpoint(folder: Path) -> dict[str, Any]:
    run = trainer("one", str(folder), limit_val_batches=0)
    run.fit(Regressor())
    run.save_checkpoint(folder / "plain.ckpt")
    return load(folder / "plain.ckpt")


def _elsewhere(root: str) -> tuple[str, list[str]]:
    said: list[str] = []
    with _network(root), mock.patch("lightning_paro.strategies._auto.rank_zero_warn", said.append):
        strategy = ParoStrategy("auto", group_size=1, **TIGHT)
        trainer(strategy, root, max_epochs=2).fit(_Deep(), ckpt_path=f"{root}/first.ckpt")
    return str(strategy.partition), said


def test_another_topology_keeps_the_choice_and_says_so(pool: Pool, tmp_path: Path) -> None:
    pool.run(_resume, str(tmp_path), LOOSE)
    for partition, (said,) in pool.run(_elsewhere, str(tmp_path)):
        assert partition == "nng"
        assert "paro_nng was decided for 4 ranks in groups of 2, and is kept for 4 in groups of 1. HINT: " in said


def _sequence(root: str, *steps: str, **options: Any) -> list[str]:
    """The partition after each of several runs of one Trainer, with steps such as ``"fit"`` and ``"validate"``."""
    with _network(root):
        run = trainer(_auto(**options), root, limit_train_batches=2, limit_val_batches=2)
        module, chosen = _Deep(), []
        for step in steps:
            if step == "another module":
                module = _Deep()
            elif step == "save":
                run.save_checkpoint(f"{root}/saved.ckpt")
                chosen.append(load(f"{root}/saved.ckpt").get("lightning_paro", {}).get("partition"))
            else:
                run.fit_loop.max_epochs = 1 + run.current_epoch
                getattr(run, step)(module)
                chosen.append(str(run.strategy.partition))
        return chosen


EVALUATION_FITS = 4 * (66 + 12 * 246) * 1.05 + 1
"""Bytes of the parameters alone, and the margin: enough to evaluate them whole, not to train them."""


def test_an_evaluation_looks_for_memory_of_parameters_only(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_sequence, str(tmp_path), "validate", memory=EVALUATION_FITS)[0] == ["nnn"]
    (fewer,) = pool.run(_sequence, str(tmp_path), "test", memory=EVALUATION_FITS - 2)[0]
    assert fewer[0] == "i"


def test_a_choice_for_training_serves_evaluation_and_not_the_reverse(pool: Pool, tmp_path: Path) -> None:
    steps = ("validate", "save", "fit", "save", "validate", "test", "save", "fit")
    for chosen in pool.run(_sequence, str(tmp_path), *steps, **TIGHT):
        assert chosen == ["nnn", None, "ggg", "ggg", "ggg", "ggg", "ggg", "ggg"]


def test_another_module_is_another_decision(pool: Pool, tmp_path: Path) -> None:
    for chosen in pool.run(_sequence, str(tmp_path), "fit", "another module", "validate", **TIGHT):
        assert chosen == ["ggg", "nnn"]


# ---- batches --------------------------------------------------------------------------------------------------------


class _Stream(IterableDataset):
    """Can be read once."""

    def __init__(self) -> None:
        self.left = list(samples(12))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.left:
            yield self.left.pop(0)


class _Seen(Regressor):
    """Writes into its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(tuple(batch[0].shape))
        return self.loss([batch[0].mul_(2), batch[1]])


def _stream(root: str, options: dict[str, Any]) -> list[tuple[int, ...]]:
    module = _Seen()
    with _network(root):
        trainer(_auto(**ROOMY, **options), root, limit_val_batches=0).fit(module, DataLoader(_Stream(), batch_size=4))
    assert all(tensor.eq(1).all() for tensor in options.get("example_batch", ()))
    return module.seen


def test_a_stream_is_not_read_to_measure(pool: Pool, tmp_path: Path) -> None:
    message = r"ValueError: a batch is needed to measure a step, and _Stream may be a stream.*example_batch=.*compute="
    _expect(pool, message, _stream, str(tmp_path), {})
    example = [torch.ones(6, 5), torch.ones(6, 3)]
    for options in ({"example_batch": example}, GIVEN):
        for seen in pool.run(_stream, str(tmp_path), options):
            assert seen == [(4, 5)] * 3


class _Several(_Seen):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((len(batch["a"][0]), len(batch["b"][0][0])))
        return self.loss(batch["a"]) + self.loss(batch["b"][0])


def _several(root: str) -> tuple[list[tuple[int, ...]], float]:
    module = _Several()
    loaders = {
        "a": DataLoader(samples(16), batch_sampler=[[0, 1], [2]]),
        "b": [DataLoader(samples(32), batch_size=4)],
    }
    with _network(root):
        run = trainer(_auto(**ROOMY), root, limit_val_batches=0, max_steps=1, use_distributed_sampler=False)
        run.fit(module, loaders)
    return module.seen, run.strategy._auto.plan.workload.activations


def test_a_collection_of_loaders_gives_a_collection_of_batches(pool: Pool, tmp_path: Path) -> None:
    for seen, activations in pool.run(_several, str(tmp_path)):
        assert seen == [(2, 4)]
        assert activations == 4 * (2 + 4) * (5 + 2 * (7 + 2 + 7 + 15) + 7 + 6)


class _FromWorkers(TensorDataset):
    """Refuses to be read by the process that trains, as a file that is opened once would."""

    def __getitem__(self, index: int) -> Any:
        assert get_worker_info() is not None
        return super().__getitem__(index)


def test_one_rank_needs_no_network_and_workers_read_the_batch(tmp_path: Path) -> None:
    run = trainer(ParoStrategy("auto"), str(tmp_path), devices=1, max_steps=1, limit_val_batches=0)
    run.fit(Regressor(), DataLoader(_FromWorkers(*samples().tensors), batch_size=4, num_workers=2))
    assert str(run.strategy.partition) == "nnn"
    assert run.strategy._auto.plan.workload.activations == 4 * 4 * (5 + 2 * (7 + 2 + 7 + 15) + 7 + 6)


# ---- memory ---------------------------------------------------------------------------------------------------------


def _short_of_memory(root: str, needed: set[int]) -> tuple[list[int], float, float]:
    """Rank 1 can measure with this number of units away from the device only; what each attempt was, and the result."""
    attempts: list[int] = []

    def measure(*_: Any, units: Any, **__: Any) -> Measured:
        attempts.append(len(units))
        if rank() == 1 and len(units) not in needed:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Measured(1.0 + rank(), 1000 * (1 + len(units)) + rank())

    with mock.patch("lightning_paro.strategies._trial.measure", measure):
        _, plan = _fit(root, ROOMY, Regressor)
    return attempts, plan.workload.compute, plan.workload.activations


def test_where_one_rank_is_short_of_memory_all_measure_unit_by_unit(pool: Pool, tmp_path: Path) -> None:
    slowest = float(WORLD_SIZE)
    for result in pool.run(_short_of_memory, str(tmp_path), {0, 2}):
        assert result == ([0], slowest, 1000 + WORLD_SIZE - 1)
    for result in pool.run(_short_of_memory, str(tmp_path), {2}):
        assert result == ([0, 2], slowest, 3000 + WORLD_SIZE - 1)
    message = (
        "one micro-batch does not fit in the memory of every rank, even .* one unit at a time. HINT: use activation"
    )
    _expect(pool, message, _short_of_memory, str(tmp_path), set())


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_and_the_driver_are_asked(tmp_path: Path) -> None:
    settings = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "max_steps": 1, "limit_val_batches": 0}
    run = trainer(ParoStrategy("auto"), str(tmp_path), **settings)
    run.fit(Regressor(), DataLoader(samples(), batch_size=4))
    plan = run.strategy._auto.plan
    assert 0 < plan.memory <= torch.cuda.get_device_properties(0).total_memory
    assert plan.workload.activations > 0
    assert plan.workload.compute > 0
    assert plan.workload.sizes == StateBytes.of("bf16-mixed")


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_nothing_fits(pool: Pool, tmp_path: Path) -> None:
    least = min(_by_hand(1e9).rows, key=lambda row: row.cost.memory_bytes)
    need = least.cost.memory_bytes * 1.05
    _expect(
        pool,
        f"no partition fits in the 2e-05 GB of the smallest rank. paro_ggg needs the least: {need / 1e9:.4g} GB with "
        f"a margin of 5%, {(need - 20_000) / 1e9:.4g} GB too much; 1e-05 GB are activations.*paro_nnn.*HINT: use "
        "activation_checkpointing, a smaller batch_size with more accumulate_grad_batches, more ranks.*'paro_ggg'",
        _fit,
        str(tmp_path),
        GIVEN | {"memory": 20_000},
    )


@pytest.mark.parametrize(
    "option",
    [{"memory": 1e9}, {"compute": 0.0}, {"activations": 1}, {"example_batch": torch.zeros(2)}, {"reprobe": True}],
    ids=lambda option: next(iter(option)),
)
def test_options_of_the_choice_need_a_choice(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"only of use where the partition is to be found out, but it is 'iig'") as got:
        ParoStrategy("iig", **option)
    assert next(iter(option)) in str(got.value)
    assert str(ParoStrategy("auto", **option).partition) == "auto"


@pytest.mark.parametrize(
    "option",
    [
        {"memory": 0},
        {"memory": -1e9},
        {"memory": math.inf},
        {"compute": -1.0},
        {"compute": "1"},
        {"activations": math.nan},
    ],
)
def test_numbers_that_make_no_sense(option: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=rf"{next(iter(option))}=.* is not understood: expected a number of (bytes|sec)"
    ):
        ParoStrategy("auto", **option)


_ONE = {"accumulate_grad_batches": 1}  # micro-batch; manual optimization takes no other number


class _Manual(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class _Picky(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.optimizers:
            raise KeyError("there is no optimizer yet")
        return self.loss(batch)


class _NoLoss(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class _Iterating(Regressor):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_Manual, "with manual optimization forward and backward cannot be run without the optimizers. HINT: give"),
        (
            _Picky,
            "RuntimeError: .*of a copy of _Picky, run to measure it, failed: KeyError: 'there is no optimizer yet'",
        ),
        (_NoLoss, "failed: TypeError: training_step returned no loss, but NoneType"),
        (_Iterating, r"training_step\(dataloader_iter\) takes its batches itself"),
    ],
)
def test_a_step_that_cannot_be_measured(pool: Pool, tmp_path: Path, module: type[Regressor], message: str) -> None:
    _expect(pool, f"{message}.*ParoStrategy\\('auto', compute=<seconds>", _fit, str(tmp_path), ROOMY, module, **_ONE)


@pytest.mark.parametrize("module", [_Manual, _Picky])
def test_with_numbers_there_is_nothing_to_measure(pool: Pool, tmp_path: Path, module: type[Regressor]) -> None:
    for name, _ in pool.run(_fit, str(tmp_path), GIVEN | ROOMY, module, **_ONE):
        assert name == "nng"


# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_name_is_registered_and_a_configuration_may_say_it(tmp_path: Path) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy="paro_auto", logger=False).strategy
    assert isinstance(strategy, ParoStrategy)
    assert str(strategy.partition) == "auto"
    for text in ("paro_auto", "{class_path: lightning_paro.ParoStrategy, init_args: {partition: auto, memory: 8e10}}"):
        config = tmp_path / "config.yaml"
        config.write_text(f"trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy: {text}\n")
        cli = LightningCLI(BoringModel, BoringDataModule, args=["--config", str(config)], run=False)
        assert isinstance(cli.trainer.strategy, ParoStrategy)
        assert cli.trainer.strategy._auto.memory == (8e10 if "memory" in text else None)
