"""Ranks that do not have the same number of batches: served in evaluation, stopped with the counts in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_paro.sharding import Engine

__all__ = ["Lockstep"]


class Lockstep(Callback):
    """Stands first among the Trainer's callbacks while ParoStrategy runs; strategies have no hook at these places.

    Args:
        engine: The engine of the run.
        publish: Tells the other ranks of an exception, before a callback tries to save a checkpoint with them.
    """

    def __init__(self, engine: Engine, publish: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._publish = publish
        self._compare_steps = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the lengths of the loaders, or, where they have none, prepare to compare every step."""
        counts = self._engine.agree("counting the training batches", lambda: trainer.num_training_batches)
        self._compare_steps = any(count == float("inf") for count in counts)
        if not self._compare_steps and len(set(counts)) > 1:
            raise _uneven(counts)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare who has another batch: Lightning's next step begins with a collective of its own."""
        if not self._compare_steps or self._engine.topology.world_size == 1:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        flags = torch.tensor([int(progress.is_last_batch), int(not progress.is_last_batch)])
        if bool(self._engine.maximum(flags, "comparing the number of training batches").all()):
            count = f"{'' if progress.is_last_batch else 'more than '}{progress.current.ready}"
            raise _uneven(self._engine.agree("counting the training batches", lambda: count))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A checkpoint on exception is saved only if all ranks fail; one that fails alone says so first."""
        self._publish(exception)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """This rank's batches are done, the others' perhaps not."""
        self._engine.evaluation.join()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


def _uneven(counts: Sequence[object]) -> ValueError:
    by_rank = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    return ValueError(
        f"the ranks have different numbers of training batches ({by_rank}), and a step is the work of all ranks. HINT: "
        "use a DistributedSampler (Lightning's default), drop the surplus, or set Trainer(limit_train_batches=...)."
    )
