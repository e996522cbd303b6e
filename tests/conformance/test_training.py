"""What Lightning's Trainer adds to a training loop, compared with one process on the whole batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanSquaredError

from lightning_paro import ParoStrategy
from tests.conformance.support import (
    ALL,
    COVER,
    SPREAD,
    Regressor,
    assert_close,
    by_default,
    rank,
    samples,
    trainer,
    values,
)
from tests.distributed.pool import WORLD_SIZE, Pool, WorkerError


def _train(strategy: Any, root: str, module: type[Regressor] = Regressor, **arguments: Any) -> dict[str, Any]:
    """Weights, metrics and progress after a fit in float64."""
    model = module()
    run = trainer(strategy, root, **({"precision": "64-true", "limit_val_batches": 0} | arguments))
    run.fit(model)
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    seen = getattr(model, "seen", None)
    return {"weights": values(model), "metrics": metrics, "step": run.global_step, "seen": seen}


def _compare(pool: Pool, root: Path, partition: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Train in one process and on four ranks, and expect the same; return the oracle."""
    expected = _train("one", str(root), *args, **kwargs)
    for result in pool.run(_train, partition, str(root), *args, **kwargs):
        assert_close(result, expected)
    return expected


@pytest.mark.parametrize("partition", COVER)
def test_a_partial_window_at_the_end_of_an_epoch_is_a_step(pool: Pool, tmp_path: Path, partition: str) -> None:
    oracle = _compare(pool, tmp_path, partition, accumulate_grad_batches=4, max_epochs=2)
    assert oracle["step"] == 4  # six batches are a window of four and one of two


@pytest.mark.parametrize("partition", by_default("nig", "iig", of=["nig", "iig", "ggg"]))
def test_validation_inside_an_accumulation_window_leaves_it_alone(pool: Pool, tmp_path: Path, partition: str) -> None:
    _compare(pool, tmp_path, partition, accumulate_grad_batches=3, val_check_interval=1, limit_val_batches=2)


class _Scheduled:
    """GradientAccumulationScheduler keeps state: a new one for every Trainer."""

    @staticmethod
    def run(strategy: str, root: str) -> dict[str, Any]:
        schedule = GradientAccumulationScheduler({0: 1, 1: 3, 2: 4})
        return _train(strategy, root, max_epochs=3, callbacks=[schedule])


@pytest.mark.parametrize("partition", by_default("iig", "ggg", of=["nig", "iig", "ggg"]))
def test_gradient_accumulation_may_be_scheduled(pool: Pool, tmp_path: Path, partition: str) -> None:
    expected = _Scheduled.run("one", str(tmp_path))
    assert expected["step"] == 6 + 2 + 2
    for result in pool.run(_Scheduled.run, partition, str(tmp_path)):
        assert_close(result, expected)


class _Norms(Regressor):
    """Notes the gradient norm before every step, by the strategy or by torch, and what is left after clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [*getattr(self, "seen", []), self.norm()]

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.seen.append(self.norm())

    def norm(self) -> float:
        if isinstance(self.trainer.strategy, ParoStrategy):
            return self.trainer.strategy.grad_norm().item()
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item()


@pytest.mark.parametrize(
    ("partition", "algorithm", "limit"),
    [
        pytest.param(name, *how, marks=() if name in chosen else pytest.mark.full)
        for how, chosen in ((("norm", 0.2), SPREAD), (("value", 0.02), ["iig", "ggg"]))
        for name in ALL
    ],
)
def test_clipping_and_the_gradient_norm_are_those_of_the_whole_batch(
    pool: Pool, tmp_path: Path, partition: str, algorithm: str, limit: float
) -> None:
    clip = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    oracle = _compare(pool, tmp_path, partition, _Norms, accumulate_grad_batches=2, **clip)
    before, after = oracle["seen"][::2], oracle["seen"][1::2]
    assert all(b > 1.2 * a for b, a in zip(before, after, strict=True)), "the limit must matter"
    if algorithm == "norm":
        assert all(math.isclose(a, limit, rel_tol=1e-5) for a in after)


class _AfterBackward(_Norms):
    """Notes the gradient norm, and how many parameters show a gradient, as soon as Lightning says it is there."""

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...

    def on_after_backward(self) -> None:
        shown = sum(parameter.grad is not None for parameter in self.parameters())
        self.seen = [*getattr(self, "seen", []), float(shown), self.norm()]


@pytest.mark.parametrize("partition", COVER)
def test_on_after_backward_sees_the_gradient_of_the_whole_batch(pool: Pool, tmp_path: Path, partition: str) -> None:
    oracle = _compare(pool, tmp_path, partition, _AfterBackward)
    assert all(shown == len(list(Regressor().parameters())) for shown in oracle["seen"][::2])


class _TwoSchedulers(Regressor):
    """One scheduler by step that also cycles beta1, one by epoch that looks at a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.optimizers().param_groups[0]
        self.seen = [*getattr(self, "seen", []), group["lr"], group["betas"][0]]


@pytest.mark.parametrize("partition", by_default("nig", of=["nig", "iig", "ggg"]))
def test_several_schedulers_drive_one_optimizer(pool: Pool, tmp_path: Path, partition: str) -> None:
    oracle = _compare(pool, tmp_path, partition, _TwoSchedulers, max_epochs=3, limit_val_batches=2)
    assert len(set(oracle["seen"])) > 20


class _ParamGroups(Regressor):
    """Several param groups, one of them without parameters on most ranks."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.net.outlet.bias], "lr": 0.05},
            {"params": [p for n, p in self.named_parameters() if "blocks" in n], "weight_decay": 0.0},
            {"params": [p for n, p in self.named_parameters() if "blocks" not in n and n != "net.outlet.bias"]},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("partition", by_default("nig", "ggg", of=["nig", "iig", "ggg"]))
def test_param_groups_keep_their_own_settings(pool: Pool, tmp_path: Path, partition: str) -> None:
    _compare(pool, tmp_path, partition, _ParamGroups, gradient_clip_val=0.5)


class _Skipping(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["ddp", "nnn", "iig"])
def test_a_skipped_training_step_is_refused_by_lightning_on_all_ranks(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_train, strategy, str(tmp_path), _Skipping)
    for message in caught.value.messages():
        assert "Skipping the `training_step` by returning None in distributed training is not supported" in message


class _Piecewise(Regressor):
    """Calls parts of the model, and reads a parameter outside of every block, without any forward of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.inlet(batch[0])
        for block in self.net.blocks:
            x = block(x)
        y = torch.nn.functional.linear(x, self.net.outlet.weight, self.net.outlet.bias)
        return torch.nn.functional.mse_loss(y, batch[1]) + 1e-2 * self.net.inlet.weight.square().sum()


@pytest.mark.parametrize("partition", COVER)
def test_training_step_may_call_submodules_instead_of_forward(pool: Pool, tmp_path: Path, partition: str) -> None:
    _compare(pool, tmp_path, partition, _Piecewise)


class _Metrics(Regressor):
    """A torchmetrics metric, and logged values that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error.update(self(batch[0]).flatten(), batch[1].flatten())
        self.log("error", self.error)
        self.log("first", batch[0][:, 0].mean(), sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for how in ("mean", "sum", "max", "min"):
            self.log(how, float(10 * batch_idx + rank()), on_step=False, on_epoch=True, reduce_fx=how, sync_dist=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.parametrize("partition", by_default("iig", of=["nnn", "iig", "ggg"]))
def test_metrics_and_synchronised_logging_are_those_of_the_whole_data(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    expected = _train("one", str(tmp_path), _Metrics, limit_val_batches=6)["metrics"]
    steps, ranks = range(6), range(WORLD_SIZE)
    by_rank = [[10.0 * step + r for step in steps] for r in ranks]
    # Lightning reduces over the steps of a rank, then over ranks
    expected["mean"] = sum(map(sum, by_rank)) / (6 * WORLD_SIZE)
    expected["sum"] = float(sum(map(sum, by_rank)))
    expected["max"], expected["min"] = 53.0, 0.0
    for result in pool.run(_train, partition, str(tmp_path), _Metrics, limit_val_batches=6):
        metrics = dict(sorted(result["metrics"].items()))
        assert_close(metrics, dict(sorted(expected.items())), tolerance=1e-6)  # torchmetrics computes in float32


class _GettingWorse(Regressor):
    """Its validation loss rises on rank 2 alone from the third epoch on."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        worse = rank() == 2 or self.trainer.world_size == 1
        epoch = self.current_epoch
        self.log("val", 1.0 / (epoch + 1) + (100.0 * (epoch >= 2) * worse), sync_dist=True)


class _Stopping:
    @staticmethod
    def run(strategy: str, root: str) -> tuple[int, int]:
        stop = EarlyStopping("val", patience=2)
        run = trainer(strategy, root, max_epochs=10, callbacks=[stop], limit_train_batches=1, limit_val_batches=1)
        run.fit(_GettingWorse())
        return run.current_epoch, stop.stopped_epoch


@pytest.mark.parametrize("partition", by_default("nnn", of=["nnn", "iig", "ggg"]))
def test_early_stopping_stops_all_ranks_at_once(pool: Pool, tmp_path: Path, partition: str) -> None:
    expected = _Stopping.run("one", str(tmp_path))
    assert expected == (4, 3)
    assert pool.run(_Stopping.run, partition, str(tmp_path)) == [expected] * WORLD_SIZE


class _Collectives(Regressor):
    def on_train_start(self) -> None:
        strategy, r = self.trainer.strategy, rank()
        self.seen = {
            "mean": strategy.reduce(torch.tensor(float(r))).item(),
            "sum": strategy.reduce(torch.tensor(float(r)), reduce_op="sum").item(),
            "not a tensor": strategy.reduce("text"),
            "broadcast": strategy.broadcast({"rank": r}, src=2),
            "gather": strategy.all_gather(torch.tensor([r, 10 * r])).tolist(),
            "module gather": self.all_gather({"rank": torch.tensor(r)})["rank"].tolist(),
            "all": [strategy.reduce_boolean_decision(r >= low, all=True) for low in (0, 1)],
            "any": [strategy.reduce_boolean_decision(r >= low, all=False) for low in (3, 4)],
            "rank": (strategy.global_rank, strategy.local_rank, strategy.world_size, self.trainer.is_global_zero),
        }
        strategy.barrier("here")
        gathered = strategy.all_gather(torch.ones(2, requires_grad=True) * r, sync_grads=True)
        self.seen["sync_grads"] = (tuple(gathered.shape), gathered.requires_grad)


@pytest.mark.parametrize("partition", by_default("ggg", of=["nnn", "iig", "ggg"]))
def test_the_collectives_of_the_strategy_are_those_of_ddp(pool: Pool, tmp_path: Path, partition: str) -> None:
    ours = [result["seen"] for result in pool.run(_train, partition, str(tmp_path), _Collectives, max_steps=1)]
    ddp = [result["seen"] for result in pool.run(_train, "ddp", str(tmp_path), _Collectives, max_steps=1)]
    assert ours == ddp
    assert ours[0]["mean"] == 1.5
    assert ours[1]["broadcast"] == {"rank": 2}
    assert ours[3]["all"] + ours[3]["any"] == [True, False, True, False]


def _sampler(strategy: str, root: str) -> list[Any]:
    class Shuffled(Regressor):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(samples(), batch_size=2, shuffle=True)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(samples(10), batch_size=2)

    module = Shuffled()
    run = trainer(strategy, root, max_epochs=2)
    run.fit(module)
    found = []
    for loader in (run.train_dataloader, run.val_dataloaders):
        sampler = loader.sampler
        assert isinstance(sampler, DistributedSampler)
        found.append([sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.epoch, list(sampler)])
    return found


def test_lightning_injects_the_same_distributed_sampler_as_for_ddp(pool: Pool, tmp_path: Path) -> None:
    ours, ddp = pool.run(_sampler, "iig", str(tmp_path)), pool.run(_sampler, "ddp", str(tmp_path))
    assert ours == ddp
    assert [train[:4] for train, _ in ours] == [[WORLD_SIZE, r, True, 1] for r in range(WORLD_SIZE)]
    assert sorted(index for train, _ in ours for index in train[4]) == list(range(48))


def _gradient_utility(partition: str, root: str) -> str | dict[str, float]:
    class Asking(Regressor):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self, 2)
            self.seen = {key: float(value) for key, value in norms.items()}

    try:
        return _train(partition, root, Asking, max_steps=1)["seen"]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("partition", ["nnn", "nig", "iig", "ggg"])
def test_lightnings_grad_norm_utility_is_right_or_names_ours(pool: Pool, tmp_path: Path, partition: str) -> None:
    expected = _gradient_utility("one", str(tmp_path))
    for result in pool.run(_gradient_utility, partition, str(tmp_path)):
        if partition == "nnn":
            assert_close(result, expected, tolerance=1e-4)  # the utility rounds to four digits
        else:
            assert "lies in shards over the ranks" in result
            assert "trainer.strategy.grad_norm()" in result


@pytest.mark.parametrize(
    ("precision", "kind", "dtype"),
    [
        (None, Precision, torch.float32),
        ("32-true", Precision, torch.float32),
        ("64-true", DoublePrecision, torch.float64),
        ("bf16-mixed", MixedPrecision, torch.float32),
        ("bf16-true", HalfPrecision, torch.bfloat16),
    ],
)
def test_each_precision_keeps_lightnings_plugin_class(
    tmp_path: Path, precision: Any, kind: type[Precision], dtype: torch.dtype
) -> None:
    run = Trainer(accelerator="cpu", devices=2, strategy="paro_iig", precision=precision, default_root_dir=tmp_path)
    assert isinstance(run.precision_plugin, kind)
    assert run.strategy.precision_plugin is run.precision_plugin
    assert run.precision == (precision or "32-true")
    with run.precision_plugin.tensor_init_context():
        assert torch.empty(1).dtype == dtype
    by_plugin = Trainer(
        accelerator="cpu", devices=2, strategy="paro_iig", plugins=[_plugin(kind, precision)], default_root_dir=tmp_path
    )
    assert type(by_plugin.precision_plugin) is type(run.precision_plugin)
    assert by_plugin.precision == run.precision


def _plugin(kind: type[Precision], precision: str | None) -> Precision:
    if kind is MixedPrecision:
        return MixedPrecision(precision, "cpu")
    return kind(precision) if kind is HalfPrecision else kind()


@pytest.mark.parametrize(
    "flags",
    [
        {"fast_dev_run": 2},
        {"detect_anomaly": True},
        {"overfit_batches": 2},
        {"inference_mode": False, "profiler": "simple"},
        {"limit_train_batches": 3, "check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
        {"max_steps": 5, "accumulate_grad_batches": 2, "max_epochs": -1},
    ],
    ids=lambda flags: "-".join(flags),
)
@pytest.mark.filterwarnings("ignore")
def test_flags_of_the_trainer_do_what_they_do_in_one_process(pool: Pool, tmp_path: Path, flags: Any) -> None:
    _compare(pool, tmp_path, "iig", **({"max_epochs": 2, "limit_val_batches": 2} | flags))
