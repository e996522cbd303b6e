"""What the model state of LISA takes, beside that of full fine-tuning and of LoRA: counted before anything runs.

With w, q and o bytes of weight, gradient and optimizer state per parameter, P parameters of which A are trained at a
time, and R parameters of adapters, full fine-tuning takes (w + q + o)P, LISA wP + (q + o)A and LoRA wP + (w + q + o)R.
Activations are not in it, nor what an allocator or a library keeps for itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_paro.algorithms.anatomy import Anatomy
from lightning_paro.planner import StateBytes

__all__ = [
    "ModelState",
    "ParameterCounts",
    "adapter_parameters",
    "arms",
    "binary_unit",
    "bytes_per_parameter",
    "bytes_text",
    "fitting_layers",
    "lisa_state",
    "model_state",
    "parse_bytes",
]

Divisors = tuple[int, int, int]

WHOLE: Divisors = (1, 1, 1)
"""Nothing is sharded."""

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1, "": 1}
"""Bytes of what may follow a number."""


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a model has, and where; what is tied or shared counts once.

    Attributes:
        total: All of them, those that are never trained included.
        embeddings: Trainable ones of the embeddings.
        head: Trainable ones of the head, less those that are tied to the embeddings.
        rest: Other trainable ones outside of the layers, such as the last norm.
        layers: Trainable ones of each layer.
        tied: Whether head and embeddings share a tensor, so that both are trained or none.
    """

    total: int
    embeddings: int
    head: int
    rest: int
    layers: tuple[int, ...]
    tied: bool = False

    @classmethod
    def of(cls, anatomy: Anatomy, total: int | None = None) -> ParameterCounts:
        """Count a model that :func:`dissect` took apart, which may be on the meta device.

        Args:
            anatomy: Its trainable parameters.
            total: Number of its parameters; those of the anatomy unless told.
        """
        places = (anatomy.embeddings, anatomy.head, anatomy.rest, *anatomy.layers.values())
        embeddings, head, rest, *layers = (sum(p.numel() for p in place.values()) for place in places)
        trainable = embeddings + head + rest + sum(layers)
        return cls(trainable if total is None else total, embeddings, head, rest, tuple(layers), anatomy.tied)

    @property
    def trainable(self) -> int:
        """Number of parameters that are ever trained."""
        return self.embeddings + self.head + self.rest + sum(self.layers)

    def active(self, num_layers: int, *, embeddings: bool = True, head: bool = True) -> int:
        """Number of parameters that LISA trains at a time, at most: those of the largest layers.

        Args:
            num_layers: Layers that are trained at a time, gamma.
            embeddings: Whether the embeddings are trained.
            head: Whether the head is; what is tied goes with the embeddings.

        Raises:
            ValueError: If there are not that many layers.
        """
        if not 0 <= num_layers <= len(self.layers):
            raise ValueError(
                f"num_layers={num_layers} is not understood: expected 0 to {len(self.layers)}, the number of layers."
            )
        largest = sorted(self.layers, reverse=True)[:num_layers]
        return self.embeddings * embeddings + self.head * head + self.rest + sum(largest)


@dataclass(frozen=True)
class ModelState:
    """Bytes of the model state on one rank.

    Attributes:
        arm: What is trained, and how.
        weights: Bytes of weights; of master weights, if there are any, under ``state``.
        gradients: Bytes of gradients.
        state: Bytes of optimizer state.
        predicted: Whether this is computed, not measured.
    """

    arm: str
    weights: int
    gradients: int
    state: int
    predicted: bool = True

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.weights + self.gradients + self.state


def bytes_per_parameter(precision: str, *, paro: bool = False, grad_dtype: str | None = None) -> StateBytes:
    """Bytes of weight w, gradient q, and state of Adam o, by the name of a precision.

    Lightning's mixed precisions leave weights, gradients and moments in float32 (4, 4, 8); ParoStrategy's have weights
    in two bytes, an accumulator, and masters beside the moments (2, 4, 12). All others are the same in both:
    ``bf16-true`` is 2, 2, 4 with moments in bfloat16, ``32-true`` is 4, 4, 8, ``64-true`` is 8, 8, 16.

    Args:
        precision: As the Trainer's.
        paro: Whether ParoStrategy trains.
        grad_dtype: As ParoStrategy's: ``"bfloat16"`` gradients are added up in two bytes.

    Raises:
        ValueError: If the precision is not known, or a dtype does not fit it.
    """
    plain = not paro and precision in ("bf16-mixed", "16-mixed")
    return StateBytes.of("32-true" if plain else precision, grad_dtype)


def model_state(arm: str, parameters: int, trained: int, sizes: StateBytes, divisors: Divisors = WHOLE) -> ModelState:
    """The formula: w * parameters / d(p) + q * trained / d(g) + o * trained / d(os), in bytes.

    Args:
        arm: Its name.
        parameters: Number of all parameters, P.
        trained: Number of those with a gradient and optimizer state, A.
        sizes: Bytes per parameter.
        divisors: Into how many shards parameters, gradients and optimizer state are split. Where the first and the last
            are one number above 1, ParoStrategy casts trained weights from their masters and keeps no copy of them.
    """
    p, g, os = divisors
    copied = sizes.copied * trained if p == os > 1 else 0
    return ModelState(
        arm,
        math.ceil((sizes.parameters * parameters - copied) / p),
        math.ceil(sizes.gradients * trained / g),
        math.ceil(sizes.optimizer * trained / os),
    )


def lisa_state(
    counts: ParameterCounts,
    num_layers: int,
    sizes: StateBytes,
    *,
    embeddings: bool = True,
    head: bool = True,
    divisors: Divisors = WHOLE,
) -> ModelState:
    """The peak of LISA if what is frozen has neither gradient nor optimizer state.

    Args:
        counts: Of the model.
        num_layers: Layers that are trained at a time, gamma.
        sizes: Bytes per parameter.
        embeddings: Whether the embeddings are trained.
        head: Whether the head is.
        divisors: As of :func:`model_state`.

    Raises:
        ValueError: If there are not that many layers.
    """
    active = counts.active(num_layers, embeddings=embeddings, head=head)
    names = ["E"] * (embeddings and counts.embeddings > 0)
    names += ["H"] * (embeddings if counts.tied else head and counts.head > 0)
    names += [f"{num_layers}L"] * (num_layers > 0)
    return model_state(f"LISA {'+'.join(names) or '0L'}", counts.total, active, sizes, divisors)


def arms(
    counts: ParameterCounts,
    num_layers: Iterable[int],
    sizes: StateBytes,
    *,
    adapters: Mapping[int, int] | None = None,
    divisors: Divisors = WHOLE,
) -> list[ModelState]:
    """Full fine-tuning, LISA without head, without layers and with each number of layers, and LoRA.

    Args:
        counts: Of the model.
        num_layers: Numbers of layers that are trained at a time.
        sizes: Bytes per parameter.
        adapters: Number of parameters of LoRA's adapters, by rank. They count in the precision of the model; peft keeps
            those of a model in bfloat16 in float32 unless ``autocast_adapter_dtype=False``.
        divisors: As of :func:`model_state`.

    Raises:
        ValueError: If there are not that many layers.
    """
    rows = [model_state("full", counts.total, counts.trainable, sizes, divisors)]
    if counts.embeddings and counts.head and not counts.tied:
        rows.append(lisa_state(counts, 0, sizes, head=False, divisors=divisors))
    rows += [lisa_state(counts, number, sizes, divisors=divisors) for number in sorted({0, *num_layers})]
    for rank, size in sorted((adapters or {}).items()):
        rows.append(model_state(f"LoRA r{rank}", counts.total + size, size, sizes, divisors))
    return rows


def adapter_parameters(model: nn.Module, layers: Iterable[str], rank: int) -> int:
    """Number of parameters of LoRA's adapters on every linear module of the layers: rank * (in + out) each.

    Args:
        model: May be on the meta device.
        layers: Names of the modules that are its layers, such as ``Anatomy.layers``.
        rank: Of the adapters, r.

    Raises:
        ValueError: If the rank is below 1.
    """
    from transformers.pytorch_utils import Conv1D

    if rank < 1:
        raise ValueError(f"rank={rank} is not understood: expected at least 1. HINT: LISA's paper has 128 and 256.")
    ends = 0
    for module in {m for name in layers for m in model.get_submodule(name).modules()}:
        if isinstance(module, nn.Linear):
            ends += module.in_features + module.out_features
        elif isinstance(module, Conv1D):
            ends += sum(module.weight.shape)
    return rank * ends


def fitting_layers(
    budget_bytes: int,
    counts: ParameterCounts,
    sizes: StateBytes,
    *,
    embeddings: bool = True,
    head: bool = True,
    divisors: Divisors = WHOLE,
    overhead_bytes: int = 0,
    overhead_per_layer: int = 0,
) -> int:
    """The most layers that can be trained at a time within a memory.

    Args:
        budget_bytes: Bytes that a rank may use.
        counts: Of the model.
        sizes: Bytes per parameter.
        embeddings: Whether the embeddings are trained.
        head: Whether the head is.
        divisors: As of :func:`model_state`.
        overhead_bytes: Bytes of everything that the formula does not count, activations above all.
        overhead_per_layer: What each layer after the first adds to that.

    Returns:
        Between 1 and the number of layers.

    Raises:
        ValueError: If not even one layer fits.
    """
    takes = [
        lisa_state(counts, number, sizes, embeddings=embeddings, head=head, divisors=divisors).total
        + overhead_bytes
        + max(number - 1, 0) * overhead_per_layer
        for number in range(len(counts.layers) + 1)
    ]
    fitting = sum(size <= budget_bytes for size in takes) - 1  # they ascend
    if fitting < 1:
        raise ValueError(
            f"a memory of {bytes_text(budget_bytes)} is not enough: one layer at a time takes {bytes_text(takes[1])}, "
            f"and none {bytes_text(takes[0])}, of which {bytes_text(overhead_bytes)} are not model state. HINT: freeze "
            "embeddings or head, shard the state with ParoStrategy, or allow for more memory."
        )
    return fitting


def parse_bytes(text: str | float) -> int:
    """Bytes of ``"20GiB"``, ``"1.5 GB"`` or a plain number.

    Raises:
        ValueError: If it is not a positive number, alone or with one of :data:`UNITS`.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if found is None or found[2] not in UNITS or not 1 <= (size := float(found[1]) * UNITS[found[2]]) < math.inf:
        raise ValueError(
            f"{text!r} is not an amount of memory: expected a number of bytes, at least 1, alone or followed by "
            f"{', '.join(filter(None, UNITS))}. HINT: for example '20GiB'."
        )
    return int(size)


def binary_unit(size: int) -> tuple[str, int]:
    """The unit that an amount of memory is read well in, and its bytes."""
    return next(((unit, UNITS[unit]) for unit in ("GiB", "MiB") if size >= UNITS[unit]), ("KiB", UNITS["KiB"]))


def bytes_text(size: int) -> str:
    """An amount of memory to be read, such as ``"1.50 GiB"``."""
    unit, nbytes = binary_unit(size)
    return f"{size / nbytes:.2f} {unit}"
