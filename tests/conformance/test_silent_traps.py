"""Mistakes of a strategy that no error tells of: each of these was silently wrong in some strategy once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_paro import ParoStrategy
from tests.conformance.support import Regressor, assert_close, load, rank, samples, trainer, values
from tests.distributed.pool import WORLD_SIZE, Pool, free_port


def test_trap_1_the_strategy_says_that_it_is_distributed(tmp_path: Path) -> None:
    run = Trainer(accelerator="cpu", devices=2, strategy="paro_iig", default_root_dir=tmp_path)
    assert run._accelerator_connector.is_distributed


def _trap_1(root: str) -> tuple[int, float]:
    """Number of batches, and the mean over ranks of the rank."""

    class Counting(Regressor):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(samples(), batch_size=2)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("rank", float(rank()), sync_dist=True)

    run = trainer("iig", root)
    run.fit(Counting())
    assert isinstance(run.train_dataloader.sampler, DistributedSampler)
    return int(run.num_training_batches), float(run.callback_metrics["rank"])


def test_trap_1_ranks_share_the_data_and_synchronise_what_they_log(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_trap_1, str(tmp_path)) == [(6, 1.5)] * WORLD_SIZE


class _Half(Regressor):
    """Mixed fp16, which Lightning gives to GPUs only; the gradient of rank 2 is infinite at the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and (rank() == 2 or self.trainer.world_size == 1) else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen = [*getattr(self, "seen", []), self.trainer.precision_plugin.scaler.get_scale()]


def _trap_2(strategy: str, root: str, resume: str | None = None) -> tuple[list[float], dict[str, Any]]:
    """The scale of the loss after every step, and the weights at the end."""
    module = _Half()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run = trainer(strategy, root, plugins=[plugin], max_epochs=1 if resume is None else 2, gradient_clip_val=1.0)
    run.fit(module, ckpt_path=resume)
    if resume is None:
        run.save_checkpoint(f"{root}/{strategy}.ckpt")
    return module.seen, values(module)


@pytest.mark.parametrize("partition", ["iig", "ggg"])
def test_trap_2_ranks_of_a_gradient_scaler_skip_together(pool: Pool, tmp_path: Path, partition: str) -> None:
    root = str(tmp_path)
    scales, weights = _trap_2("one", root)
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0]  # halved at the infinite step, doubled after three
    for ours, trained in pool.run(_trap_2, partition, root):
        assert ours == scales
        assert_close(trained, weights, tolerance=2e-2)  # the forward rounds to ten bits
    ours, theirs = load(f"{root}/{partition}.ckpt"), load(f"{root}/one.ckpt")
    assert ours["MixedPrecision"] == theirs["MixedPrecision"]
    assert list(ours) == list(theirs)
    continued, _ = _trap_2("one", root, resume=f"{root}/{partition}.ckpt")
    for scales, _ in pool.run(_trap_2, partition, root, resume=f"{root}/one.ckpt"):
        assert scales == continued


class _Pickled:
    """Something that is not among the classes that ``weights_only`` loads."""

    def __init__(self, value: int) -> None:
        self.value = value


class _WithObject(Regressor):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["object"] = _Pickled(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["object"].value


def _trap_3(root: str) -> list[Any]:
    """Load a checkpoint with an object of an unknown class, with every value of ``weights_only``."""
    run = trainer("iig", root)
    run.fit(_WithObject())
    run.save_checkpoint(f"{root}/object.ckpt")
    results: list[Any] = []
    for weights_only in (False, True):
        module = _WithObject()
        try:
            trainer("iig", root, max_epochs=2).fit(module, ckpt_path=f"{root}/object.ckpt", weights_only=weights_only)
            results.append(module.found)
        except Exception as error:
            results.append(str(error))
    return results


def test_trap_3_weights_only_reaches_the_loading_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    for unsafe, safe in pool.run(_trap_3, str(tmp_path)):
        assert unsafe == 3
        assert "Weights only load failed" in safe


@pytest.mark.parametrize("strategy", ["paro_iig", "instance", "by setter"])
def test_trap_4_precision_is_validated_whatever_way_the_strategy_is_given(tmp_path: Path, strategy: str) -> None:
    given: Any = ParoStrategy("iig") if strategy != "paro_iig" else strategy
    with pytest.raises(ValueError, match="does not support precision '16-true'"):
        Trainer(accelerator="cpu", devices=2, strategy=given, precision="16-true", default_root_dir=tmp_path)


def _cli(arguments: list[str]) -> Any:
    cli = LightningCLI(Regressor, run=False, args=arguments, save_config_callback=None)
    return cli.trainer.strategy


COMMON = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]


@pytest.mark.parametrize(
    ("arguments", "partition", "group_size"),
    [
        (["--trainer.strategy=paro_gig"], "gig", None),
        (["--trainer.strategy=PARO_GIG"], "gig", None),
        (["--trainer.strategy.class_path=lightning_paro.ParoStrategy"], "iig", None),
        (["--trainer.strategy=lightning_paro.ParoStrategy", "--trainer.strategy.group_size=2"], "iig", 2),
        (
            [
                "--trainer.strategy.class_path=lightning_paro.ParoStrategy",
                "--trainer.strategy.init_args.partition=nng",
                "--trainer.strategy.init_args.group_size=2",
            ],
            "nng",
            2,
        ),
    ],
    ids=lambda value: value[0].removeprefix("--trainer.strategy") if isinstance(value, list) else str(value),
)
def test_trap_5_the_command_line_builds_the_strategy(arguments: list[str], partition: str, group_size: Any) -> None:
    strategy = _cli([*COMMON, *arguments])
    assert isinstance(strategy, ParoStrategy)
    assert str(strategy.partition) == partition
    assert strategy.group_size == group_size


def test_trap_5_a_class_path_without_arguments_is_taken_for_a_name_and_the_error_says_which() -> None:
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='lightning_paro.parostrategy'`"):
        _cli([*COMMON, "--trainer.strategy=lightning_paro.ParoStrategy"])


class _Inferring(Regressor):
    """Notes where Lightning evaluates under inference mode: on NCCL in every entry point but fit, on gloo nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inferring: set[tuple[TrainerFn | None, bool]] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inferring.add((self.trainer.state.fn, torch.is_inference_mode_enabled()))
        super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert not torch.is_inference_mode_enabled()


def _trap_6(run: Trainer, module: Regressor) -> tuple[list[float], dict[str, Any]]:
    """The losses before and after a fit, and the weights at the end."""
    losses = []
    for fit in (True, False):
        (metrics,) = run.validate(module, verbose=False)
        losses.append(metrics["val_loss"])
        if fit:
            run.fit(module)
    return losses, values(module)


def _rank_of_trap_6(
    rank: int, port: int, partition: str, group_size: int, root: str, expected: tuple[list[float], dict[str, Any]]
) -> None:
    """All in one process, so that what is born under inference mode is still there in training."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="trap 6",
    )  # fmt: skip
    module = _Inferring().double()
    settings = {"accelerator": "gpu", "devices": 2, "precision": "64-true", "num_sanity_val_steps": 2}
    run = trainer(ParoStrategy(partition, group_size=group_size), root, val_check_interval=2, **settings)
    losses, weights = _trap_6(run, module)
    assert module.inferring == {(TrainerFn.VALIDATING, True), (TrainerFn.FITTING, False)}
    assert_close(losses, expected[0], tolerance=1e-6)
    assert_close(weights, expected[1])
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("partition", ["nnn", "nig", "iig", "ggg"])
def test_trap_6_what_is_born_in_a_validation_under_inference_mode_can_be_trained(
    tmp_path: Path, partition: str, group_size: int
) -> None:
    root = str(tmp_path)
    expected = _trap_6(trainer("one", root, precision="64-true"), Regressor().double())
    torch.multiprocessing.spawn(_rank_of_trap_6, (free_port(), partition, group_size, root, expected), nprocs=2)


def test_trap_8_the_sampler_knows_of_all_nodes(tmp_path: Path) -> None:
    run = Trainer(accelerator="cpu", devices=2, num_nodes=3, strategy="paro_iig", default_root_dir=tmp_path)
    assert run.strategy.num_nodes == 3
    assert run.strategy.num_processes == 2
    assert run.world_size == 6
    assert run.strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}


class _Slow(TorchCheckpointIO):
    """Still writing when the run is over, unless somebody waits."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.5)
        super().save_checkpoint(*args, **kwargs)


def _trap_9(root: str) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    module = _Saving(f"{root}/async.ckpt")
    run = trainer("iig", root, plugins=[AsyncCheckpointIO(_Slow())])
    run.fit(module)
    is_written = rank() != 0 or Path(f"{root}/async.ckpt").exists()
    run.strategy.barrier()
    saved = load(f"{root}/async.ckpt")["state_dict"]
    return is_written, {name: value.numpy() for name, value in saved.items()}, values(module)


class _Saving(Regressor):
    """Saves after its last step; the weights must be those of that moment although writing happens later."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.trainer.save_checkpoint(self.path)


def test_trap_9_an_asynchronous_checkpoint_is_written_before_the_run_ends(pool: Pool, tmp_path: Path) -> None:
    for is_written, saved, weights in pool.run(_trap_9, str(tmp_path)):
        assert is_written
        assert_close(saved, weights, tolerance=0.0)
