"""Whole values for code that is no forward: on all ranks for a user, on the host for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._unit import Unit
from lightning_paro.sharding._values import Written, take_over_all
from lightning_paro.topology import Granularity

if TYPE_CHECKING:
    from lightning_paro.sharding._engine import Engine

__all__ = ["lent_to_rank_zero", "rewritten", "whole_on_all_ranks"]


@contextmanager
def whole_on_all_ranks(engine: Engine, units: Sequence[Unit], writeback: bool) -> Iterator[None]:
    """See :meth:`Engine.full_parameters`."""
    engine.meet("entering full_parameters")
    flats = [flat for unit in units for flat in unit.flats]
    if writeback and any(flat.written is Written.LOST for flat in flats):
        raise RuntimeError(
            "full_parameters(writeback=True) was entered inside full_parameters() without writeback, which loses what "
            "is written in it. HINT: leave the outer context first, or enter it with writeback=True as well."
        )
    with ExitStack() as stack:
        for unit in units:
            unit.hold()
            stack.callback(unit.let_go)
        for flat in flats:
            flat.settle()
        try:
            with _written(engine, flats, writeback):
                yield
        finally:
            if engine.is_in_step and torch.is_grad_enabled():  # a backward may come back to what was computed here
                for unit in units:
                    unit.is_kept = True


@contextmanager
def _written(engine: Engine, flats: Sequence[Flat], writeback: bool) -> Iterator[None]:
    """What was written before the context counts; what is written in it counts with ``writeback``."""
    flats = [flat for flat in flats if flat.written is not Written.LOST]  # the context around this one sees to those
    outside = [flat.written for flat in flats]
    if writeback or Written.RANK_ZERO in outside:
        engine.discard_ahead()
    take_over_all(flats)
    for flat in flats:
        flat.shown.note_versions()
        if writeback:
            flat.written = Written.RANK_ZERO
        else:
            flat.loan()
    try:
        yield
        if writeback:
            engine.discard_ahead()
            take_over_all(flats)
        elif flats:
            _give_back(engine, flats)
    except BaseException:  # perhaps on this rank only: no collective
        for flat in flats:
            flat.drop_written()
        raise
    finally:
        for flat, written in zip(flats, outside, strict=True):
            flat.written = written


def _give_back(engine: Engine, flats: Sequence[Flat]) -> None:
    mine = torch.tensor([int(flat.is_changed()) for flat in flats])
    marks = engine.maximum(mine, "leaving full_parameters").tolist()
    changed = [flat for flat, mark in zip(flats, marks, strict=True) if mark]
    is_partitioned = engine.partition.p is not Granularity.N
    for flat in changed if is_partitioned else ():
        flat.gather(again=True)
        flat.have_moved(flat.indices)
    for flat in flats:
        flat.give_back()
    if changed and not is_partitioned:
        engine.update({flat: flat.indices for flat in changed})


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
