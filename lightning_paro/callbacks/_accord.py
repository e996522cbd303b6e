"""Ranks agree before anything depends on it: on what they were asked to do, and on whether one has to refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["in_accord", "told_by_all"]


def told_by_all(mine: Any, world_size: int) -> list[Any]:
    """What every rank says. Collective.

    Args:
        mine: What this one does.
        world_size: Number of ranks of the training, which need not be that of a process group around it.
    """
    if world_size == 1:
        return [mine]
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told


@contextmanager
def in_accord(who: str, world_size: int, describe: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """What is refused inside on one rank is refused on all, and so is what they would do differently. Collective.

    Args:
        who: Name of what asks, for the message.
        world_size: Number of ranks of the training, which need not be that of a process group around it.
        describe: Called where nothing was refused: what must be the same on all ranks, by name.

    Raises:
        ValueError: The same on all ranks.
    """
    refusal = None
    try:
        yield
    except ValueError as error:
        refusal = error
    if world_size == 1:
        if refusal is not None:
            raise refusal
        return
    mine = (None if refusal is None else str(refusal), {} if refusal is not None else dict(describe()))
    told = told_by_all(mine, world_size)
    if refusal is not None:
        raise refusal
    for rank, (text, _) in enumerate(told):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")
    for name, value in told[0][1].items():
        for rank, (_, other) in enumerate(told):
            if other[name] != value:
                there, here = _difference(value, other[name])
                raise ValueError(
                    f"ranks disagree on {who}'s {name}: {there} on rank 0, {here} on rank {rank}. HINT: build the "
                    "model and the callback from the same arguments on every rank."
                )


def _difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Of two mappings the first entries that differ, else the values themselves."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one, other
    name = next(name for name in {**one, **other} if one.get(name) != other.get(name))
    return f"'{name}' {one.get(name, 'missing')}", f"'{name}' {other.get(name, 'missing')}"
