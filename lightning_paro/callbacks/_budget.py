"""How many layers fit into a memory: by the formula, and by what the first period took."""

from __future__ import annotations

import dataclasses

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_paro.algorithms.lisa_memory import (
    Divisors,
    ParameterCounts,
    bytes_per_parameter,
    fitting_layers,
    lisa_state,
    parse_bytes,
)
from lightning_paro.planner import StateBytes
from lightning_paro.strategies import ParoStrategy

__all__ = ["Budget"]


class Budget:
    """Chooses the number of layers for a memory.

    On a GPU the first period trains one layer and shows what activations take. Elsewhere only the model state counts.

    Args:
        text: Bytes that a rank may use, as of :func:`~lightning_paro.algorithms.lisa_memory.parse_bytes`.
    """

    def __init__(self, text: int | str) -> None:
        self.nbytes = parse_bytes(text)
        self.is_open = True
        """Whether it has yet to choose by what was measured."""

    def begin(self, trainer: Trainer, counts: ParameterCounts) -> int:
        """The number of layers to start with."""
        sizes, divisors = _sizes(trainer)
        fitting = fitting_layers(self.nbytes, counts, sizes, divisors=divisors)
        self.is_open = trainer.strategy.root_device.type == "cuda"
        if not self.is_open:
            return fitting
        torch.cuda.reset_peak_memory_stats()
        return 1

    def choose(self, trainer: Trainer, counts: ParameterCounts) -> int:
        """The number of layers, by the peak of the steps so far, the same on all ranks. Collective."""
        self.is_open = False
        sizes, divisors = _sizes(trainer)
        peak = torch.tensor(torch.cuda.max_memory_allocated(), device=trainer.strategy.root_device)
        peak = trainer.strategy.reduce(peak, reduce_op="max")
        overhead = max(int(peak) - lisa_state(counts, 1, sizes, divisors=divisors).total, 0)
        return fitting_layers(
            self.nbytes,
            counts,
            sizes,
            divisors=divisors,
            overhead_bytes=overhead,
            overhead_per_layer=overhead // len(counts.layers),  # a layer that is trained saves a part of that more
        )


def _sizes(trainer: Trainer) -> tuple[StateBytes, Divisors]:
    """Bytes per parameter with Adam, and into how many parts a rank's share is cut."""
    strategy, precision = trainer.strategy, str(trainer.precision)
    if isinstance(strategy, ParoStrategy):
        engine = strategy.engine
        divide, kept = engine.topology.divisor, engine.partition
        divisors = divide(kept.p), divide(kept.g), divide(kept.os)
        return bytes_per_parameter(precision, paro=True, grad_dtype=strategy._grad_dtype), divisors
    sizes = bytes_per_parameter(precision)
    if isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("gradient_as_bucket_view"):
        sizes = dataclasses.replace(sizes, gradients=2 * sizes.gradients)  # and as much in buckets
    n = trainer.world_size if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) else 1
    return sizes, (n, n, n)
