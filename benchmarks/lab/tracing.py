"""What the engine costs the host, by where it is entered; when the host waits for the device; what memory stays."""

from __future__ import annotations

import functools
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.lab.contestants import make
from benchmarks.lab.models import build, tokens
from benchmarks.lab.rank import Rank
from benchmarks.lab.train import Clock
from lightning_paro.sharding import Engine
from lightning_paro.sharding._backward import Backward
from lightning_paro.sharding._unit import Unit

__all__ = ["PHASES", "by_phase", "growth", "phases", "trace"]

PHASES = ("first forward", "later forward", "earlier backward", "last backward", "update")

ENTRIES: tuple[tuple[type, str], ...] = (
    (Unit, "_before_forward"),
    (Unit, "_after_forward"),
    (Unit, "_reach"),
    (Backward, "arrive"),
    (Engine, "step_begin"),
    (Engine, "step_end"),
    (Engine, "backward_begin"),
    (Engine, "backward_end"),
    (Engine, "update"),
    (Engine, "grad_norm"),
)
"""Where training enters the engine: hooks, which autograd calls from a thread of its own on a GPU, and brackets."""


@contextmanager
def clocked() -> Iterator[dict[str, list[float]]]:
    """Calls and seconds by entry; one inside another counts with the outer one."""
    spent: dict[str, list[float]] = {}
    inside = threading.local()
    originals = [(owner, name, vars(owner)[name]) for owner, name in ENTRIES]

    def timed(label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        entry = spent.setdefault(label, [0, 0.0])

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "flag", False):
                return original(*args, **kwargs)
            inside.flag = True
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                entry[0] += 1
                entry[1] += time.perf_counter() - start
                inside.flag = False

        return method

    for owner, name, original in originals:
        setattr(owner, name, timed(f"{owner.__name__}.{name.lstrip('_')}", original))
    try:
        yield spent
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def synchronisations(run: Callable[[], object]) -> Counter[str]:
    """Where the host waits for the device while ``run`` runs, by line; what torch does not see is not in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    own = ("set_sync_debug_mode", "prototype")  # what switching it on says of itself
    lines = (w for w in caught if "synchroniz" in str(w.message) and not any(x in str(w.message) for x in own))
    return Counter(f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}" for w in lines)


def phases(rank: Rank, contestant: str, model: str, accumulate: int, blocks: int) -> dict[str, float]:
    """Seconds of the device in each part of a step, medians of five steps.

    Of the forwards and backwards of a step the first and the last one are named: what goes between hosts once a step
    can only hide behind these. A phase ends when its own computation does, and not what was put off behind it.
    """
    rank.clean()
    runner = make(contestant, rank, build(model, rank.device), blocks, accumulate)
    batches = tokens(model, rank.rank, accumulate, rank.device)
    for _ in range(3):
        runner.step(batches)
    clock = Clock(rank.on_gpu)
    runner.mark = clock.mark
    rank.barrier()
    clock.mark()
    for _ in range(5):
        runner.step(batches)
    rank.barrier()
    runner.close()
    return by_phase(clock.seconds(), accumulate)


def by_phase(seconds: list[float], accumulate: int) -> dict[str, float]:
    """Medians of what steps of a forward and a backward for each micro-batch, and an update, took one after another."""
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for place, duration in enumerate(seconds):
        micro, is_backward = divmod(place % (2 * accumulate + 1), 2)
        if micro == accumulate:
            phase = "update"
        elif is_backward:
            phase = "last backward" if micro == accumulate - 1 else "earlier backward"
        else:
            phase = "later forward" if micro else "first forward"
        found[phase].append(duration)
    return {phase: statistics.median(values) for phase, values in found.items() if values}


def growth(moments: list[int]) -> int:
    """Bytes by which memory grew from the second of some moments on; the allocator is warm by then."""
    return moments[-1] - moments[min(1, len(moments) - 1)]


def trace(rank: Rank, **options: Any) -> dict[str, Any]:
    """Train, and look: host time by entry a step, launches, synchronisations, memory over many steps and after it.

    Returns:
        ``step_s``; ``host_s`` and ``calls`` by entry, a step; ``launches`` and ``synchronisations`` a step;
        ``reserved`` and ``allocated`` bytes, each at ten moments; ``left_bytes`` when everything is let go.
    """
    before = rank.clean()
    with clocked() as spent:  # to the end: the engine's hooks hold the methods that they find now
        found = _watched(rank, spent, **options)
    return found | {"left_bytes": rank.clean() - before}


def _watched(
    rank: Rank, spent: dict[str, list[float]], partition: str, model: str, accumulate: int, blocks: int, steps: int
) -> dict[str, Any]:
    runner = make(f"paro_{partition}", rank, build(model, rank.device), blocks, accumulate)
    batches = tokens(model, rank.rank, accumulate, rank.device)
    for _ in range(3):
        runner.step(batches)
    rank.barrier()
    for entry in spent.values():
        entry[:] = [0, 0.0]
    launches = runner.engine.traffic.calls
    start = time.perf_counter()
    for _ in range(5):
        runner.step(batches)
    rank.barrier()
    step_s = (time.perf_counter() - start) / 5
    launches = (runner.engine.traffic.calls - launches) // 5
    calls = {name: count / 5 for name, (count, _) in spent.items()}
    host_s = {name: seconds / 5 for name, (_, seconds) in spent.items()}
    waits = synchronisations(lambda: runner.step(batches)) if rank.on_gpu else Counter()
    reserved, allocated = [], []
    for step in range(steps):
        runner.step(batches)
        if step % max(1, steps // 10) == 0 and rank.on_gpu:
            reserved.append(torch.cuda.memory_reserved())
            allocated.append(torch.cuda.memory_allocated())
    rank.barrier()
    runner.close()
    return {
        "step_s": step_s, "launches": launches, "synchronisations": dict(waits),
        "host_s": host_s, "calls": calls, "reserved": reserved, "allocated": allocated,
    }  # fmt: skip
