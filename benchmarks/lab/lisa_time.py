"""How long an arm takes: forward, backward, optimizer and whole step, on the device; and where that time goes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.lab.lisa_arms import ARMS, Subject, subject
from benchmarks.lab.lisa_training import ends, train
from benchmarks.lab.train import Clock

__all__ = ["INTERVAL", "OPERATIONS", "PARTS", "measure", "measure_profile", "medians", "operation"]

INTERVAL, WARMUP, MEASURED = 10, 5, 20
"""Optimizer steps: of a period, of the warm-up, and those whose times count; two of these begin a period."""

PARTS = ("forward", "backward", "update")
"""Of a step. Before them comes what Lightning and callbacks do between steps, a switch of layers included."""

OPERATIONS = {
    "cross entropy": ("log_softmax", "nll_loss", "cross_entropy"),
    "gradient of the embedding": ("embedding_dense_backward", "embedding_backward"),
    "optimizer": ("adam",),
    "attention": ("attention", "flash", "efficient", "cudnn"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear"),
}
"""Parts of names of operators; what has none of them is elementwise work, for the most part."""


class Stopwatch(Callback):
    """Marks the end of each part of a step."""

    def __init__(self, on_gpu: bool) -> None:
        self.clock = Clock(on_gpu)
        self.losses: list[Tensor] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.clock.mark()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.mark()
        self.losses.append(outputs["loss"].detach())


class Profiler(Callback):
    """Profiles all steps of a training but those of the warm-up."""

    def __init__(self, on_gpu: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.profile = profile(activities=activities)
        self.steps = 0
        self._on_gpu = on_gpu

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        if self.steps == WARMUP:
            self._wait()
            self.profile.start()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._wait()
        self.profile.stop()

    def _wait(self) -> None:
        """Nothing of a step before counts, and all of the last one."""
        if self._on_gpu:
            torch.cuda.synchronize()


def measure(device: torch.device, shape: str, batch: int, arm: str, compiled: bool = False) -> dict[str, Any]:
    """Train an arm and time 20 of its steps after 5 of warm-up, with torch's own attention.

    Args:
        device: Where.
        shape: Name of the model.
        batch: Sequences of a step.
        arm: Name of the arm.
        compiled: Whether every layer is compiled, each by itself: layers differ in what requires a gradient, so LISA
            has two variants.

    Returns:
        Numbers of parameters, medians of seconds, the first and the last loss.
    """
    way = ARMS[arm]
    made = subject(shape, "sdpa", way, device)
    if compiled:
        for layer in made.layers:
            layer.compile()
    watch = Stopwatch(device.type == "cuda")
    train(made.model, shape, way, INTERVAL, WARMUP + MEASURED, watch, device, batch, watch.clock.mark)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return sizes(made, arm) | medians(watch.clock.seconds()) | ends(watch.losses)


def sizes(made: Subject, arm: str) -> dict[str, int]:
    """What the arithmetic of a step depends on: in matrices each parameter takes part in two operations a token."""
    way, matrices = ARMS[arm], made.head + sum(made.counts.layers)
    if way.lisa:
        trained = made.head + way.num_layers * max(made.counts.layers)
    else:
        trained = made.adapters if way.rank else matrices
    return {
        "parameters": made.counts.total, "adapters": made.adapters, "trained": made.trained(ARMS[arm]),
        "matrices": matrices + made.adapters,
        "trained_matrices": trained,
    }  # fmt: skip


def medians(seconds: list[float]) -> dict[str, float]:
    """Seconds by part.

    Args:
        seconds: Of the parts of all steps one after another; between two steps there is one more, from the end of one
            to the forward of the next.

    Returns:
        Medians of the measured steps: ``forward_s``, ``backward_s``, ``update_s``, ``step_s`` from the end of one step
        to that of the next, and of those that begin a period, ``switch_s``.
    """
    size = len(PARTS) + 1
    steps = {number: seconds[number * size - 1 : number * size + size - 1] for number in range(1, WARMUP + MEASURED)}
    measured = {number: parts for number, parts in steps.items() if number >= WARMUP}
    found = {f"{part}_s": statistics.median(p[i] for p in measured.values()) for i, part in enumerate(PARTS, start=1)}
    switches = [sum(parts) for number, parts in measured.items() if number % INTERVAL == 0]
    return found | {
        "step_s": statistics.median(map(sum, measured.values())), "switch_s": statistics.median(switches)
    }  # fmt: skip


def measure_profile(device: torch.device, shape: str, batch: int, arm: str) -> dict[str, Any]:
    """Profile two steps of an arm.

    Returns:
        ``operations_s``, seconds a step of each of :data:`OPERATIONS` and of the rest; None if the profiler does not
        see the device.
    """
    way = ARMS[arm]
    made = subject(shape, "sdpa", way, device)
    profiler = Profiler(device.type == "cuda")
    train(made.model, shape, way, INTERVAL, WARMUP + 2, profiler, device, batch)
    spent = dict.fromkeys([*OPERATIONS, "rest"], 0.0)
    for event in profiler.profile.key_averages():
        # kernels stand there a second time, beside what launched them; the profiler's own requests are no work
        if event.device_type.name == "CPU" and event.key != "Activity Buffer Request":
            on_device = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            spent[operation(event.key)] += on_device / 2e6
    return {"operations_s": spent if any(spent.values()) else None}


def operation(name: str) -> str:
    """Which of :data:`OPERATIONS` an operator belongs to."""
    found: Iterator[str] = (what for what, parts in OPERATIONS.items() if any(part in name.lower() for part in parts))
    return next(found, "rest")
