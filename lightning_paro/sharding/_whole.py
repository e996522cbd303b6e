"""Whole values for code that is no forward: on all ranks for a user, on the host for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_paro.collectives._compat import broadcast
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._unit import Unit
from lightning_paro.topology import Granularity

if TYPE_CHECKING:
    from lightning_paro.sharding._engine import Engine

__all__ = ["lent_to_rank_zero", "rewritten", "whole_on_all_ranks"]


@contextmanager
def whole_on_all_ranks(engine: Engine, units: Sequence[Unit], writeback: bool) -> Iterator[None]:
    """See :meth:`Engine.full_parameters`."""
    engine.meet("entering full_parameters")
    flats = [flat for unit in units for flat in unit.flats]
    is_partitioned = engine.partition.p is not Granularity.N
    with ExitStack() as stack:
        for unit in units:
            unit.hold()
            stack.callback(unit.let_go)
        for flat in flats:
            flat.settle()
            if is_partitioned:
                flat.take_over()  # what was written before counts
        yield
        if engine.is_in_step and torch.is_grad_enabled():  # a backward may come back to what was computed here
            for unit in units:
                unit.is_kept = True
        if writeback:
            engine.discard_ahead()
            _write_back(flats, engine.topology.world_size)
        elif is_partitioned and engine.any_rank(any(flat.shown.is_written() for flat in flats)):
            for flat in flats:
                flat.gather(again=True)
        if is_partitioned:
            for flat in flats:
                flat.attach()  # what else was written is dropped


def _write_back(flats: Sequence[Flat], world_size: int) -> None:
    for flat in flats:
        flat.collect()
        if world_size > 1:
            broadcast(flat.whole, src=0)
        flat.overwrite(flat.whole)


@contextmanager
def lent_to_rank_zero(engine: Engine) -> Iterator[bool]:
    """See :meth:`Engine.lent_to_rank_zero`."""
    engine.meet("reading the whole model")
    here = engine.groups.rank == 0
    for flat in engine.flats:
        flat.lend(here=here)
    try:
        yield here
    finally:
        if here:
            for flat in engine.flats:
                flat.take_back()


@contextmanager
def rewritten(engine: Engine) -> Iterator[None]:
    """See :meth:`Engine.rewritten`."""
    engine.discard_ahead()
    for flat in engine.flats:
        flat.lend()
    try:
        yield
    finally:
        for flat in engine.flats:
            flat.take_in()
