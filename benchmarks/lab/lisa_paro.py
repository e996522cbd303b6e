"""LISA under ParoStrategy between uneven hosts: step time, and what goes between hosts, with and without it."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.lab import trainer
from benchmarks.lab.models import block_numel, build, stack_of
from benchmarks.lab.rank import Rank
from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from lightning_paro.sharding import Engine
from lightning_paro.topology import Topology

__all__ = ["INTERVAL", "LAYERS", "STRATEGIES", "between_hosts", "measure", "row_of", "trained"]

STRATEGIES = ("paro_nig", "paro_iig")
LAYERS, INTERVAL = 2, 3


def trained(model: str, lisa: bool) -> int:
    """How many parameters are trained at a time."""
    whole = build(model, torch.device("meta"))
    parent, name = stack_of(whole)
    asleep = len(getattr(parent, name)) - LAYERS if lisa else 0
    return sum(parameter.numel() for parameter in whole.parameters()) - asleep * block_numel(whole)


def between_hosts(numel: int, itemsize: int, topology: Topology) -> float:
    """Bytes that a rank sends to other hosts in a step of nig or iig (PaRO, section 6), whatever the micro-batches.

    The group's sums are reduced between groups once, and the new values gathered once.

    Args:
        numel: Parameters that are trained.
        itemsize: Bytes of each on the wire.
        topology: Hosts as groups.
    """
    groups = topology.num_groups
    return 2 * numel * itemsize / topology.group_size * (groups - 1) / groups


class Count(Callback):
    """What this rank sent, from before the last step of the warm-up to the end, and what it holds in that step.

    Ranks meet at both ends, with the updates of parameters done that may be put off into the next forward.
    """

    def __init__(self, rank: Rank, warmup: int) -> None:
        self.steps = 0
        self.sent = [0, 0]
        """Bytes inside the host and between hosts, by the engine."""
        self.link = 0
        """Bytes that left this rank's host through its network interface, of all its ranks; 0 on loopback."""
        self.held: dict[str, int] = {}
        """Bytes of model state when the optimizer steps, by kind."""
        self._rank, self._warmup = rank, warmup
        self._begin = 0

    def _now(self, trainer: Trainer) -> tuple[list[int], int]:
        engine = _engine(trainer)
        engine.settle()
        self._rank.barrier()
        return [engine.traffic.intra, engine.traffic.inter], _link_bytes()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self._warmup - 1:
            self.held = _engine(trainer).held_bytes()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if not self._begin and trainer.global_step == self._warmup - 1:
            self._begin = trainer.global_step
            self.sent, self.link = self._now(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        before, link = self.sent, self.link
        self.sent, self.link = self._now(trainer)
        self.sent = [now - then for now, then in zip(self.sent, before, strict=True)]
        self.link -= link
        self.steps = trainer.global_step - self._begin


def _engine(trainer: Trainer) -> Engine:
    assert isinstance(trainer.strategy, ParoStrategy)
    return trainer.strategy.engine


def _link_bytes() -> int:
    """Bytes that this host has sent so far, by its kernel."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {interface.strip(): numbers.split() for interface, numbers in (line.split(":") for line in lines)}
    return 0 if name == "lo" else int(counts[name][8])


def measure(
    rank: Rank, model: str, accumulate: int, warmup: int, measured: int, strategy: str, lisa: bool
) -> dict[str, Any]:
    """Train as :func:`benchmarks.lab.trainer.measure` does, with LISA or without.

    Returns:
        What that returns; ``intra_bytes``, ``inter_bytes`` and ``link_bytes`` of a step, ``held`` bytes by kind, and
        how many of the measured steps LISA ``switches`` layers in.
    """
    callback = LISA(LAYERS, INTERVAL)
    count = Count(rank, warmup)
    callbacks = [callback, count] if lisa else [count]
    result = trainer.measure(rank, model, accumulate, warmup, measured, strategy, callbacks)
    begins = [step for _, step, _ in callback.periods]
    return result | {
        "intra_bytes": count.sent[0] / count.steps, "inter_bytes": count.sent[1] / count.steps,
        "link_bytes": count.link / count.steps, "held": count.held,
        "switches": sum(warmup <= step < warmup + measured for step in begins),
    }  # fmt: skip


def row_of(strategy: str, lisa: bool, repeats: list[list[dict[str, Any]]], formula: float) -> dict[str, Any]:
    """What the ranks measured, as a row: the slowest rank of each step, the largest of what is held.

    Args:
        strategy: Its name.
        lisa: Whether with LISA.
        repeats: By repeat and rank, what :func:`measure` returned.
        formula: Bytes that a rank sends to other hosts in a step.
    """
    seconds = [[max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)] for ranks in repeats]
    medians = [statistics.median(one) for one in seconds]
    everybody = [rank for ranks in repeats for rank in ranks]
    hosts = [ranks[0]["link_bytes"] for ranks in repeats]
    return {
        "strategy": strategy, "lisa": lisa, "step_s": statistics.median(s for one in seconds for s in one),
        "range_s": [min(medians), max(medians)], "seconds": seconds, "switches": repeats[0][0]["switches"],
        "inter_bytes": max(rank["inter_bytes"] for rank in everybody), "formula_bytes": formula,
        "intra_bytes": max(rank["intra_bytes"] for rank in everybody), "link_bytes": statistics.median(hosts),
        "held_bytes": max(sum(rank["held"].values()) for rank in everybody),
        "peak_bytes": max(rank["peak_bytes"] for rank in everybody), "loss": everybody[0]["loss"],
    }  # fmt: skip
