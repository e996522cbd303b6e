"""Who competes, by name: how each is made, and which values it is tried with so that the best may count."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.lab.loop import Contestant
from benchmarks.lab.rank import Rank
from lightning_paro.topology import Partition

__all__ = ["CONTESTANTS", "HSDP", "Entry", "make", "missing", "partitions"]


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        where: ``"module:Class"`` inside this package; of those that bring a loop of their own, ``"module:function"``
            in place of :func:`benchmarks.lab.train.measure`.
        options: Further arguments of the class or function.
        blocks: The numbers of blocks a unit, bucket or launch is tried with.
        differs: Whether it differs from its neighbours only in micro-batches before the last; left out at s=1.
        needs: A package that has to be installed.
    """

    where: str
    options: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] = (1, 2, 4)
    differs: bool = False
    needs: str | None = None

    @property
    def has_own_loop(self) -> bool:
        return self.where.startswith("trainer:")


def _entries() -> dict[str, Entry]:
    fsdp, fully, zero = "peers:FSDP", "peers:FullyShard", "deepspeed_zero:DeepSpeed"
    entries = {
        "floor": Entry("ours:Floor", blocks=(1,)),
        "legs": Entry("ours:Legs", blocks=(1, 2, 4, 8)),
    }
    for name in ("iig", "nig", "igg", "ggg", "nnn", "nng", "nni", "iii", "nii", "ngg", "ing", "ini", "gig", "gng"):
        entries[f"paro_{name}"] = Entry("ours:Paro", {"partition": name})
    entries |= {
        "fully_shard_2d": Entry(fully, {"mesh": 2, "sync": "inside"}),
        "fsdp_hybrid": Entry(fsdp, {"strategy": "HYBRID_SHARD"}),
        "fsdp_full": Entry(fsdp, {"strategy": "FULL_SHARD"}),
        "fsdp_grad_op": Entry(fsdp, {"strategy": "SHARD_GRAD_OP"}),
        "fully_shard_1d": Entry(fully),
        "ddp": Entry("peers:DDP"),
        "ddp_bf16_wire": Entry("peers:DDP", {"bf16_wire": True}),
        "ddp_zero": Entry("peers:DDP", {"zero": True}),
        "fully_shard_2d_no_sync": Entry(fully, {"mesh": 2, "sync": "none"}, differs=True),
        "fsdp_hybrid_no_sync": Entry(fsdp, {"strategy": "HYBRID_SHARD", "sync": False}, differs=True),
        "fsdp_grad_op_no_sync": Entry(fsdp, {"strategy": "SHARD_GRAD_OP", "sync": False}, differs=True),
        "fsdp_full_no_sync": Entry(fsdp, {"strategy": "FULL_SHARD", "sync": False}, differs=True),
        "fully_shard_1d_no_sync": Entry(fully, {"sync": "none"}, differs=True),
        "fully_shard_2d_every": Entry(fully, {"mesh": 2, "sync": "every"}, differs=True),
    }
    entries["paro_iig_low"] = Entry("ours:Paro", {"partition": "iig", "low": True})
    entries["paro_iig_autocast"] = Entry("ours:Paro", {"partition": "iig", "autocast": True})
    for name in ("paro_iig", "ddp"):
        entries[f"trainer_{name}"] = Entry("trainer:measure", {"strategy": name}, blocks=(1,))
    for stage in (1, 2, 3):
        entries[f"deepspeed_zero{stage}"] = Entry(zero, {"stage": stage}, needs="deepspeed")
    entries["deepspeed_mics"] = Entry(zero, {"stage": 3, "mics": True}, needs="deepspeed")
    return entries


CONTESTANTS = _entries()
"""In the order in which they are run: what the bars need first, what leaves memory behind last."""

HSDP: tuple[str, ...] = (
    "fsdp_hybrid",
    "fsdp_hybrid_no_sync",
    "fully_shard_2d",
    "fully_shard_2d_no_sync",
    "fully_shard_2d_every",
)
HSDP += ("deepspeed_mics",)


def partitions() -> list[str]:
    """The names of this package's own contestants."""
    return [f"paro_{partition}" for partition in Partition.valid()]


def missing(name: str) -> str | None:
    """The package that a contestant needs and that is not installed."""
    needs = CONTESTANTS[name].needs
    return needs if needs and importlib.util.find_spec(needs) is None else None


def make(name: str, rank: Rank, model: nn.Module, blocks: int, accumulate: int) -> Contestant:
    """Build a contestant around a model. Collective."""
    entry = CONTESTANTS[name]
    module, _, attribute = entry.where.partition(":")
    kind = getattr(importlib.import_module(f"benchmarks.lab.{module}"), attribute)
    options = dict(entry.options)
    if "accumulate" in inspect.signature(kind).parameters:
        options["accumulate"] = accumulate
    contestant: Contestant = kind(rank, model, blocks, **options)
    return contestant
