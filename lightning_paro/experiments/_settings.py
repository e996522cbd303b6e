"""What one of many trainings differs in, and how each is run."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from numbers import Real
from typing import Any, TypeVar

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_paro.algorithms.supar import Parameterization
from lightning_paro.algorithms.supar.rules import PARAMETERIZATIONS

__all__ = ["Make", "Setting", "numbers", "settings_of", "shown", "train"]

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        parameterization: ``"sp"``, ``"mup"`` or ``"supar"``.
        width: Of the model.
        density: Share of weights that are kept.
        seed: Of initial values and masks.
        lr: Base learning rate; None is the module's own.
    """

    parameterization: Parameterization
    width: int
    density: float
    seed: int
    lr: float | None = None

    def row(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


Make = Callable[[Setting], LightningModule]
"""Makes the module of a setting."""


def settings_of(
    parameterizations: Sequence[Parameterization],
    widths: Sequence[int],
    densities: Sequence[float],
    seeds: Sequence[int],
    lrs: Sequence[float | None] = (None,),
) -> list[Setting]:
    """All of them, in Python's own numbers.

    Raises:
        ValueError: If something is empty, appears twice, or is not understood.
    """
    kinds = _different("parameterizations", parameterizations)
    unknown = [name for name in kinds if name not in PARAMETERIZATIONS]
    if unknown:
        raise ValueError(f"parameterizations: {unknown[0]!r} is not one of {', '.join(PARAMETERIZATIONS)}.")
    shares = numbers("densities", densities, float)
    if any(not 0 < density <= 1 for density in shares):
        raise ValueError(f"densities={densities!r}: expected numbers above 0 and up to 1.")
    every = product(kinds, numbers("widths", widths, int), shares, numbers("seeds", seeds, int), lrs)
    return [Setting(*each) for each in every]


def numbers(name: str, values: Sequence[float], kind: type[Number]) -> list[Number]:
    """Python's own numbers of any, such as numpy's, which cannot be written as JSON.

    Raises:
        ValueError: If there is none, one appears twice or is no such number.
    """
    for value in _different(name, values):
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or (kind is int and not float(value).is_integer()):
            raise ValueError(f"{name}: expected {'whole ' * (kind is int)}numbers, and {value!r} is none.")
    return [kind(value) for value in values]


def _different(name: str, values: Iterable[Choice]) -> list[Choice]:
    several = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not several or len(set(several)) != len(several):
        raise ValueError(f"{name}={values!r}: expected one or more different values.")
    return several


def train(
    make: Make, setting: Setting, data: Any, steps: int, callbacks: Sequence[Callback], options: Mapping[str, Any]
) -> LightningModule:
    """A short training on one device that shows and keeps nothing, and leaves the random generators as they were.

    What else is random, such as the order of a loader, follows from the setting's seed too.

    Raises:
        ValueError: If the options have what is decided here, or the steps are no whole number of them.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a whole number, 1 or more.")
    fixed: dict[str, Any] = {
        "devices": 1, "max_steps": steps, "callbacks": list(callbacks), "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
    }  # fmt: skip
    if taken := fixed.keys() & options.keys():
        raise ValueError(f"trainer={dict(options)!r}: {min(taken)} is decided by the experiment.")
    with _quiet(), isolate_rng():
        torch.manual_seed(setting.seed)
        random.seed(setting.seed)
        numpy.random.seed(setting.seed % 2**32)
        module = make(setting)
        trainer = Trainer(**fixed, **options)
        trainer.fit(module, data)
    if not trainer.global_step:
        raise ValueError(
            f"{type(module).__name__} made no step: there are no batches, or limit_train_batches lets none through. "
            "HINT: a dataloader with one batch or more."
        )
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning tells of every Trainer."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def shown(settings: Sequence[Setting], what: str) -> Iterator[Setting]:
    """The settings one by one, with a bar of how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=len(settings))
        for setting in settings:
            about = f"{setting.parameterization}, width {setting.width}, density {setting.density:.4g}"
            progress.update(task, description=f"{what}: {about}")
            yield setting
            progress.advance(task)
