"""The measurement of one contestant on every rank: seconds of each step, peak memory, and the loss as a check."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.lab.contestants import make
from benchmarks.lab.models import build, tokens
from benchmarks.lab.rank import Rank

__all__ = ["Clock", "measure"]


class Clock:
    """Marks moments in the work of a rank; on a GPU without making the host wait."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The work that was given out so far ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each mark to the next; call it when the device has finished."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) / 1000 if self._on_gpu else b - a for a, b in pairs]


class Leak:
    """Bytes on this rank's device that contestants have left behind for good, beside what is there in idleness."""

    idle = 2**63
    nbytes = 0


LEAK = Leak()


def measure(
    rank: Rank, contestant: str, model: str, accumulate: int, blocks: int, warmup: int, measured: int
) -> dict[str, Any]:
    """Build a contestant, warm up, and measure steps that follow one another as in training.

    Ranks meet, and their devices come to rest, before the last step of the warm-up. A step lasts from the end of the
    one before to its own end on the device, so what a contestant puts off into the next step is part of its time, too.

    Returns:
        ``seconds`` of each measured step, ``peak_bytes`` allocated during them, without what an earlier contestant has
        left behind for good, ``before_bytes`` that were allocated before it was built, ``first_loss`` and ``loss``,
        ``accumulator``, and what the contestant says of itself.
    """
    before = rank.clean()
    if before:
        LEAK.idle = min(LEAK.idle, before)
    started = time.perf_counter()
    built = build(model, rank.device)
    runner = make(contestant, rank, built, blocks, accumulate)
    batches = tokens(model, rank.rank, accumulate, rank.device)
    del built
    losses = []
    for turn in range(warmup):
        if turn == warmup - 1:  # not after it: the first measured step shall wait for what this one puts off
            rank.barrier()
        losses.append(runner.step(batches))
    if rank.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(rank.on_gpu)
    clock.mark()
    for _ in range(measured):
        losses.append(runner.step(batches))
        clock.mark()
    rank.barrier()
    result = {
        "seconds": clock.seconds(), "peak_bytes": torch.cuda.max_memory_allocated() - LEAK.nbytes if rank.on_gpu else 0,
        "before_bytes": before, "first_loss": float(losses[0]), "loss": float(losses[-1]),
        "accumulator": runner.accumulator, **runner.counts(),
    }  # fmt: skip
    runner.close()
    leaks = runner.leaks
    del runner, losses, batches
    left = rank.clean()
    if leaks:
        LEAK.nbytes = max(0, left - LEAK.idle)
    return result | {"total_s": time.perf_counter() - started}
