"""What the two levels of each collective do, chunk by chunk, on flat tensors in the order of ranks.

As a grid of groups, members and elements, what one member holds of all groups is no contiguous block. One chunk of
everything therefore moves inside groups as ng collectives by one launch, and several chunks pass through staging. That
is allocated here, before any lane is entered; a chunk takes over that of the chunk ``SLOTS`` before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_paro.collectives._chunks import pieces
from lightning_paro.collectives._lanes import Steps
from lightning_paro.collectives._legs import Legs
from lightning_paro.collectives._pipeline import Stage

__all__ = ["SLOTS", "Chunks", "gather", "once", "reduce", "scatter", "spread"]

SLOTS = 3  # as many as an operation has stages, at most
ALIGNMENT = 16  # elements, so that chunks begin where links and copies are fast


class Chunks(NamedTuple):
    """The stages of every chunk, and the staging they use."""

    stages: list[list[Stage]]
    staging: tuple[Tensor, ...] = ()


def once(collective: Callable[..., object], *args: object) -> Steps:
    """A stage without local arithmetic."""
    yield collective(*args)


def gather(legs: Legs, out: Tensor, shard: Tensor, chunk_bytes: int) -> Chunks:
    """All-gather: the column's shards, then the group's columns."""
    ng, m = legs.groups.topology.num_groups, legs.groups.topology.group_size
    grid = out.view(ng, m, -1)
    order = _order(legs, out)
    cuts = _cuts(shard.numel(), ng * shard.element_size(), chunk_bytes)
    if len(cuts) == 1 and order is None:
        column = shard.new_empty(ng, shard.numel())
        between = once(legs.gather, "inter", [column.view(-1)], [shard])
        inside = once(legs.gather, "intra_gather", list(grid.flatten(1)), list(column))
        return Chunks([[("inter", between), ("intra_gather", inside)]], (column,))

    def into_grid(group: Tensor, column: Tensor, cut: slice) -> Steps:
        yield legs.gather("intra_gather", [group], [column])
        blocks = group.view(m, ng, -1).transpose(0, 1)
        if order is None:
            grid[:, :, cut].copy_(blocks)
        else:
            out.view(ng * m, -1)[:, cut].index_copy_(0, order, blocks.flatten(0, 1))

    chunks: list[list[Stage]] = []
    staging, slots = _slots(shard, cuts, ng, m)
    for cut, column, group in slots:
        between = once(legs.gather, "inter", [column], [shard[cut]])
        chunks.append([("inter", between), ("intra_gather", into_grid(group, column, cut))])
    return Chunks(chunks, staging)


def scatter(legs: Legs, out: Tensor, whole: Tensor, chunk_bytes: int) -> Chunks:
    """Reduce-scatter: sums of the group for this member, then of the column for this group."""
    ng, m = legs.groups.topology.num_groups, legs.groups.topology.group_size
    grid = whole.view(ng, m, -1)
    order = _order(legs, whole)
    cuts = _cuts(out.numel(), ng * out.element_size(), chunk_bytes)
    if len(cuts) == 1 and order is None:
        column = out.new_empty(ng, out.numel())
        inside = legs.scatter("intra_reduce", list(column), list(grid.flatten(1)))
        between = legs.scatter("inter", [out], [column.view(-1)])
        return Chunks([[("intra_reduce", inside), ("inter", between)]], (column,))

    def out_of_grid(column: Tensor, group: Tensor, cut: slice) -> Steps:
        blocks = grid[:, :, cut] if order is None else whole.view(ng * m, -1)[order, cut].view(ng, m, -1)
        group.view(m, ng, -1).copy_(blocks.transpose(0, 1))
        yield from legs.scatter("intra_reduce", [column], [group])

    chunks: list[list[Stage]] = []
    staging, slots = _slots(out, cuts, ng, m)
    for cut, column, group in slots:
        between = legs.scatter("inter", [out[cut]], [column])
        chunks.append([("intra_reduce", out_of_grid(column, group, cut)), ("inter", between)])
    return Chunks(chunks, staging)


def reduce(legs: Legs, tensor: Tensor, chunk_bytes: int) -> Chunks:
    """All-reduce: reduce-scatter inside, all-reduce between, all-gather inside; what m does not divide is padded."""
    m = legs.groups.topology.group_size
    cuts = _cuts(-(-tensor.numel() // m), tensor.element_size(), chunk_bytes)
    parts = tensor.new_empty(min(SLOTS, len(cuts)), cuts[0].stop)
    last = tensor[m * cuts[-1].start :]
    padded = tensor.new_empty(0 if last.numel() % m == 0 else m * (cuts[-1].stop - cuts[-1].start))

    def down(whole: Tensor, part: Tensor) -> Steps:
        if whole is padded:
            padded[last.numel() :].zero_()
            padded[: last.numel()].copy_(last)
        yield from legs.scatter("intra_reduce", [part], [whole])

    def up(whole: Tensor, part: Tensor) -> Steps:
        yield legs.gather("intra_gather", [whole], [part])
        if whole is padded:
            last.copy_(padded[: last.numel()])

    chunks: list[list[Stage]] = []
    for k, cut in enumerate(cuts):
        part = parts[k % SLOTS, : cut.stop - cut.start]
        whole = padded if cut is cuts[-1] and padded.numel() else tensor[m * cut.start : m * cut.stop]
        between = once(legs.reduce, "inter", part)
        chunks.append([("intra_reduce", down(whole, part)), ("inter", between), ("intra_gather", up(whole, part))])
    return Chunks(chunks, (parts, padded))


def spread(legs: Legs, tensor: Tensor, src: int, chunk_bytes: int) -> Chunks:
    """Broadcast: along the column of ``src``, then from the member of that column in every group."""
    topology = legs.groups.topology
    i, j = topology.coordinates(legs.groups.rank)
    _, column = topology.coordinates(src)
    inner = topology.intra_ranks(i)[column]
    chunks: list[list[Stage]] = []
    for cut in _cuts(tensor.numel(), tensor.element_size(), chunk_bytes):
        between = once(legs.broadcast, "inter", tensor[cut], src) if j == column else iter(())
        inside = once(legs.broadcast, "intra_gather", tensor[cut], inner)
        chunks.append([("inter", between), ("intra_gather", inside)])
    return Chunks(chunks)


def _slots(
    part: Tensor, cuts: list[slice], ng: int, m: int
) -> tuple[tuple[Tensor, Tensor], list[tuple[slice, Tensor, Tensor]]]:
    """Staging of ``part``'s kind; and every chunk with its piece for a column's parts and its piece for a group's."""
    columns = part.new_empty(SLOTS, ng * cuts[0].stop)
    groups = part.new_empty(SLOTS, m * ng * cuts[0].stop)
    slots = []
    for k, cut in enumerate(cuts):
        length = cut.stop - cut.start
        slots.append((cut, columns[k % SLOTS, : ng * length], groups[k % SLOTS, : m * ng * length]))
    return (columns, groups), slots


def _order(legs: Legs, tensor: Tensor) -> Tensor | None:
    """The ranks, group by group, where that is not their own order."""
    groups = legs.groups.topology.groups
    return torch.tensor([rank for group in groups for rank in group], device=tensor.device) if groups else None


def _cuts(length: int, width: int, chunk_bytes: int) -> list[slice]:
    """Cut ``length`` elements, each of which is ``width`` bytes between groups, into chunks of ``chunk_bytes``."""
    return pieces(length, max(chunk_bytes // width, 1) if chunk_bytes else 0, ALIGNMENT)
