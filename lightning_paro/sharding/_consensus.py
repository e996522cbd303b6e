"""What ranks agree on before, and beside, the tensor collectives. Everything here is small and stays on the host."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_paro.collectives import ProcessGroups, Traffic, ranks_by_value
from lightning_paro.topology import Partition

__all__ = ["agree", "check_same_model", "describe_model", "different_paths", "maximum", "meet"]

T = TypeVar("T")

_ROOM = 6
"""How many integers :func:`meet` carries: every meeting has one size, whoever comes for what."""

_MEETING_BYTES = 8 * (2 + _ROOM)


def meet(groups: ProcessGroups, what: str, values: Tensor | None = None) -> None:
    """All ranks come here for the same purpose, or all are told who came for what.

    Args:
        groups: The process groups.
        what: What for.
        values: Up to six integers on the host, which become their elementwise maximum over all ranks.

    Raises:
        RuntimeError: If they did not; on all ranks.
    """
    if groups.control is None:
        return
    code = zlib.crc32(what.encode())  # the same in every process
    message = torch.zeros(2 + _ROOM, dtype=torch.int64)
    message[:2] = torch.tensor([code, -code])
    brought = message[2 : 2 + (0 if values is None else values.numel())]
    if values is not None:
        brought.copy_(values.view(-1))
    with groups.progress.enter(what):
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=groups.control)
    if int(message[0]) == -int(message[1]):
        if values is not None:
            values.copy_(brought.view(values.shape))
        return
    everyone: list[str] = [""] * groups.topology.world_size
    dist.all_gather_object(everyone, what, group=groups.control)
    lines = "\n".join(f"  {_ranks(ranks)}: {place}" for place, ranks in ranks_by_value(everyone).items())
    raise RuntimeError(
        f"the ranks do different things at the same time:\n{lines}\nHINT: every rank must make the same collective "
        "calls in the same order, so call full_parameters, grad_norm, save_checkpoint and log(sync_dist=True) on all "
        "ranks, not on rank 0 only."
    )


def agree(groups: ProcessGroups, what: str, make: Callable[[], T]) -> list[T]:
    """Run ``make`` on every rank and hand everybody's result to everybody; if one rank fails, all do.

    Args:
        groups: The process groups.
        what: What is being done, for the error of the other ranks.
        make: Local work whose result can be pickled.

    Returns:
        The results, by rank.

    Raises:
        Exception: The original exception on the rank where ``make`` raised; RuntimeError with its traceback elsewhere.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = make()
    except Exception as exception:
        error = exception
    report = "".join(traceback.format_exception(error)) if error is not None else None
    everyone: list[Any] = [(report, result)]
    if groups.control is not None:
        meet(groups, what)
        everyone = [None] * groups.topology.world_size
        with groups.progress.enter(what):
            dist.all_gather_object(everyone, (report, result), group=groups.control)
    if error is not None:
        raise error
    failed = [(rank, text) for rank, (text, _) in enumerate(everyone) if text is not None]
    if failed:
        rank, text = failed[0]
        raise RuntimeError(f"rank {rank} failed in {what}, so this rank stops as well. Its error:\n{text}")
    return [result for _, result in everyone]


def maximum(
    groups: ProcessGroups, values: Tensor, what: str, in_step: bool = False, traffic: Traffic | None = None
) -> Tensor:
    """The elementwise maximum of an integer host tensor over all ranks, in place; ``what`` says what it is for.

    ``in_step`` if ranks are known to come here together, so that nothing has to be compared first; ``traffic`` counts
    the bytes that a rank brings.
    """
    rides_along = values.numel() <= _ROOM and not in_step
    if not in_step:
        meet(groups, what, values if rides_along else None)
    if groups.control is not None and not rides_along:
        with groups.progress.enter(what):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=groups.control)
    if traffic is not None:
        traffic.control += (0 if in_step else _MEETING_BYTES) + (0 if rides_along else values.nbytes)
    return values


def describe_model(module: nn.Module, **layout: Any) -> dict[str, Any]:
    """What must be the same on all ranks for a module to be sharded; values are not part of it."""
    first: dict[int, str] = {}
    described: dict[str, Any] = {f"setting {key}": value for key, value in layout.items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        facts = f"{tuple(parameter.shape)} {_short(parameter.dtype)} requires_grad={parameter.requires_grad}"
        described[f"parameter '{name}'"] = facts if tied == name else f"tied to '{tied}'"
    for name, buffer in module.named_buffers():
        described[f"buffer '{name}'"] = f"{tuple(buffer.shape)} {_short(buffer.dtype)}"
    return described


def check_same_model(descriptions: list[dict[str, Any]]) -> None:
    """Compare what :func:`describe_model` said on all ranks.

    Raises:
        ValueError: If ranks disagree; the same on all ranks, with the first differences and who has which.
    """
    lines = []
    for key in dict.fromkeys(key for description in descriptions for key in description):
        sides = ranks_by_value(str(description.get(key, "absent")) for description in descriptions)
        if len(sides) > 1:
            lines.append(f"  {key}: " + "; ".join(f"{value} on {_ranks(r)}" for value, r in sides.items()))
    if not lines:
        same_order = all(list(d) == list(descriptions[0]) for d in descriptions)
        if same_order:
            return
        lines = ["  the same parameters, but in another order"]
    shown = "\n".join(lines[:5]) + (f"\n  ... and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise ValueError(
        f"the ranks do not agree on the model ({len(lines)} differences):\n{shown}\n"
        "HINT: build the same model on every rank; only values may differ, rank 0's are used."
    )


def different_paths(paths: list[list[str]], partition: Partition) -> RuntimeError:
    """The error for ranks that did not gather the same units; ``paths`` are the units each gathered, in order."""
    lines = []
    for unit in dict.fromkeys(unit for path in paths for unit in path):
        counts = ranks_by_value(path.count(unit) for path in paths)
        if len(counts) > 1:
            times = "; ".join(f"{count} times on {_ranks(ranks)}" for count, ranks in counts.items())
            lines.append(f"  unit '{unit}': {times}")
    shown = "\n".join(lines[:8] or ["  the same units in another order"])
    return RuntimeError(
        f"with partitioned parameters (p={partition.p.name}) every rank must run the same units in the same order, but "
        f"these were gathered differently:\n{shown}\n"
        "HINT: make the choice of layers the same on all ranks, or use a strategy with p=N such as paro_nig."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
