"""One micro-batch of a LightningModule, run aside for its time and activations: nothing of the training notices."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_paro.collectives import ProcessGroups
from lightning_paro.planner import Measured, measure
from lightning_paro.sharding import PrecisionPolicy, UnitSpec, agree

__all__ = ["measure_micro_batch"]

_GIVE_NUMBERS = "give the numbers, ParoStrategy('auto', compute=<seconds>, activations=<bytes>)"


def measure_micro_batch(
    trainer: Trainer,
    module: LightningModule,
    groups: ProcessGroups,
    policy: PrecisionPolicy,
    units: Sequence[UnitSpec],
    example_batch: Any,
) -> Measured:
    """Time and activations of one forward and backward, each the largest of all ranks. Collective.

    A copy of the module runs, whole on the device. Where that is too large for some rank, all let the parameters of a
    unit be there only while it computes.

    Args:
        trainer: Whose precision and, without an example, first batch are used; its loggers hear nothing.
        module: Is not changed.
        groups: All ranks compute at once, as in training; a training step may contain collectives.
        policy: Dtypes.
        units: Of the module.
        example_batch: What the dataloader would give; None for its first batch.

    Raises:
        ValueError: If the step or the batch cannot be had without consequences.
        RuntimeError: If the step fails.
    """
    whole: dict[str, list[nn.Parameter]] = {}
    in_units = {unit.name: [p for _, p in unit.parameters] for unit in units if unit.module is not None}
    for held in (whole, in_units):
        attempt = partial(_attempt, trainer, module, policy, held, example_batch)
        results = [result for result in agree(groups, "measuring a micro-batch", attempt) if result is not None]
        if len(results) == groups.topology.world_size:
            return Measured(max(r.seconds for r in results), max(r.activations for r in results))
    raise ValueError(
        "one micro-batch does not fit in the memory of every rank, even with the parameters of one unit at a time. "
        "HINT: use activation_checkpointing, or a smaller batch_size and more accumulate_grad_batches."
    )


def _attempt(
    trainer: Trainer,
    module: LightningModule,
    policy: PrecisionPolicy,
    units: Mapping[str, Sequence[nn.Parameter]],
    example_batch: Any,
) -> Measured | None:
    """None if the memory was too small."""
    if not module.automatic_optimization:
        raise ValueError(
            "with manual optimization forward and backward cannot be run without the optimizers. HINT: "
            f"{_GIVE_NUMBERS}, or name the partition."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(dataloader_iter) takes its batches itself, and they would be lost. HINT: " + _GIVE_NUMBERS
        )
    device = trainer.strategy.root_device
    with _aside(trainer, device):
        batch = _first_batch(trainer) if example_batch is None else example_batch
        try:
            return measure(
                module,
                partial(_on_device, trainer, batch),
                partial(_loss, trainer),
                device=device,
                compute_dtype=policy.compute_dtype,
                units=units,
            )
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            raise RuntimeError(
                f"the training step of a copy of {type(module).__name__}, run to measure it, failed: "
                f"{type(error).__name__}: {error}\nHINT: if only the copy fails, {_GIVE_NUMBERS}."
            ) from error


@contextmanager
def _aside(trainer: Trainer, device: torch.device) -> Generator[None]:
    """Random generators go on as if nothing had happened inside, and loggers hear nothing."""
    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    on_gpu = [device] if device.type == "cuda" else []
    try:
        with isolate_rng(include_cuda=False), torch.random.fork_rng(on_gpu), torch.enable_grad():
            yield
    finally:
        trainer.loggers = loggers


def _on_device(trainer: Trainer, batch: Any) -> Any:
    """As Lightning does it; of a copy, since a step may change its batch."""
    batch = trainer.precision_plugin.convert_input(copy.deepcopy(batch))
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _loss(trainer: Trainer, twin: LightningModule, batch: Any) -> Tensor:
    twin.trainer = trainer
    for child in twin.modules():
        if isinstance(child, LightningModule):
            vars(child).update(log=_ignore, log_dict=_ignore)
    arguments = trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0)
    with trainer.precision_plugin.train_step_context():
        output = twin.training_step(*arguments.values())
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(f"training_step returned no loss, but {type(output).__name__}.")
    return loss


def _ignore(*_: Any, **__: Any) -> None:
    """In place of ``self.log``."""


def _first_batch(trainer: Trainer) -> Any:
    """A batch as the training dataloaders would give it first."""
    source = trainer.fit_loop._data_source.dataloader()
    loaders = source if isinstance(source, CombinedLoader) else CombinedLoader(source, "max_size_cycle")
    if loaders._mode == "sequential":
        return _batch_of(loaders.flattened[0])
    return tree_unflatten([_batch_of(loader) for loader in loaders.flattened], loaders._spec)


def _batch_of(loader: object) -> Any:
    """One batch by copies of the samplers: the loader, and what it draws from, are as before."""
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        kind = type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
        raise ValueError(
            f"a batch is needed to measure a step, and {kind} may be a stream, from which it would be missing. HINT: "
            f"give one, ParoStrategy('auto', example_batch=...), or {_GIVE_NUMBERS}."
        )
    memo = {id(loader.dataset): loader.dataset}
    again = DataLoader(
        loader.dataset,
        batch_size=None if loader.batch_sampler is None else 1,
        sampler=copy.deepcopy(loader.sampler, memo) if loader.batch_sampler is None else None,
        batch_sampler=copy.deepcopy(loader.batch_sampler, memo),
        num_workers=min(loader.num_workers, 1),
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    for batch in again:
        return batch
    raise ValueError("the training dataloader has no batch.")
