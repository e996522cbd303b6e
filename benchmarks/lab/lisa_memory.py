"""What an arm holds while it trains, walked over live tensors, and the peak of its device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from benchmarks.lab.lisa_arms import ARMS, Arm, Subject, formula, subject
from benchmarks.lab.lisa_training import ends, train

__all__ = ["INTERVAL", "KINDS", "held", "measure", "periods"]

INTERVAL, WARMUP = 2, 2
"""Optimizer steps of a period, and of the warm-up: the peak is that of all later ones."""

KINDS = ("weights", "gradients", "states")


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory behind some tensors, each piece counted once."""
    pieces = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({piece.data_ptr(): piece.nbytes() for piece in pieces}.values())


def periods(arm: Arm, layers: int) -> int:
    """For how many periods an arm trains: four, or enough to train every layer twice if they came in turn.

    By then an arm that keeps state holds that of most layers. The one that does not, with which it is compared, runs as
    long.
    """
    return max(4, math.ceil(2 * layers / arm.num_layers)) if arm.is_long else 4


class Recorder(Callback):
    """Of every step: bytes of weights, gradients and optimizer state, and which layers are trained.

    When the optimizer is done all three are there at once. Gradients are counted just before that: LISA frees them
    after the step, where Lightning alone keeps them until the next backward.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self.losses: list[Tensor] = []
        self.sizes: list[dict[str, int]] = []
        self.active: list[list[int]] = []
        self.allocated: list[int] = []
        self._gradients = 0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._gradients = held(parameter.grad for parameter in module.parameters())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        parameters = list(module.parameters())
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.sizes.append({
            "weights": held(parameters),
            "gradients": self._gradients,
            "states": held(value for state in states for value in state.values() if isinstance(value, Tensor)),
        })  # fmt: skip
        self.active.append(
            [i for i, layer in enumerate(self._layers) if any(p.requires_grad for p in layer.parameters())]
        )
        self.losses.append(outputs["loss"].detach())
        if module.device.type == "cuda":
            self.allocated.append(torch.cuda.memory_allocated())
            if len(self.losses) == WARMUP:
                torch.cuda.reset_peak_memory_stats()

    def largest(self) -> dict[str, int]:
        """The bytes after that step since the warm-up when they were most."""
        return max(self.sizes[WARMUP:], key=lambda size: sum(size.values()))


def measure(device: torch.device, shape: str, attention: str, arm: str) -> dict[str, Any]:
    """Train an arm for several periods, in a process of its own, and say what it held.

    Returns:
        Its ``parameters`` and how many are ``trained`` at a time; bytes of ``weights``, ``gradients`` and ``states``
        of the step since the warm-up when they were most, beside the ``formula_bytes`` of these together, with the
        relative ``error``; layers that were trained (``active``) and bytes of state, by period; the first and the last
        loss. On a GPU: ``peak_bytes``, ``reserved_bytes``, ``activations_bytes``, which is what the peak has beside the
        three, and ``between_bytes``, the most that was allocated between two steps.
    """
    way = ARMS[arm]
    made = subject(shape, attention, way, device)
    recorder = Recorder(made.layers)
    steps = INTERVAL * periods(way, len(made.layers))
    train(made.model, shape, way, INTERVAL, steps, recorder, device)
    return _walked(way, made, recorder) | _peaks(recorder, device)


def _walked(arm: Arm, made: Subject, recorder: Recorder) -> dict[str, Any]:
    sizes = recorder.largest()
    active = recorder.active[INTERVAL - 1 :: INTERVAL] if arm.lisa else []
    seen = len({layer for layers in active for layer in layers})
    expected = formula(arm, made, seen)
    return {
        "parameters": made.counts.total + made.adapters, "trained": made.trained(arm), "layers": len(made.layers),
        "interval": INTERVAL, "periods": len(recorder.sizes) // INTERVAL, "active": active, "layers_seen": seen,
        **{f"{kind}_bytes": value for kind, value in sizes.items()},
        "formula_bytes": expected, "error": sum(sizes.values()) / expected - 1,
        "states_by_period": [size["states"] for size in recorder.sizes[INTERVAL - 1 :: INTERVAL]],
        **ends(recorder.losses),
    }  # fmt: skip


def _peaks(recorder: Recorder, device: torch.device) -> dict[str, Any]:
    """What the device says; a CPU says nothing."""
    if device.type != "cuda":
        return dict.fromkeys(("peak_bytes", "reserved_bytes", "activations_bytes", "between_bytes"))
    peak = torch.cuda.max_memory_allocated()
    known = sum(recorder.largest().values())
    return {
        "peak_bytes": peak, "reserved_bytes": torch.cuda.max_memory_reserved(), "activations_bytes": peak - known,
        "between_bytes": max(recorder.allocated[WARMUP:]),
    }  # fmt: skip
