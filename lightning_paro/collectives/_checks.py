"""What the two-level collectives refuse before they send anything, in the same words on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from lightning_paro.collectives._compat import MOVABLE
from lightning_paro.collectives._groups import ProcessGroups

__all__ = [
    "check_call", "check_multiple", "check_same_call", "check_src", "check_summable", "ranks_by_value",
    "refused_together",
]  # fmt: skip

T = TypeVar("T")


def check_call(
    what: str, groups: ProcessGroups, algorithm: str, chunk_bytes: int | None, tensors: dict[str, Tensor]
) -> None:
    """Groups, options, and that the tensors are dense, of one dtype and on one device."""
    if not isinstance(groups, ProcessGroups):
        raise TypeError(
            f"{what}: groups must be ProcessGroups, got {type(groups).__name__}. "
            "HINT: ProcessGroups.create(Topology(world_size, group_size)), on all ranks."
        )
    if algorithm not in ("two-level", "flat"):
        raise ValueError(
            f"{what}: algorithm={algorithm!r} is not known. HINT: 'two-level', or 'flat' for torch's own collective "
            "over all ranks."
        )
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 0):
        raise ValueError(
            f"{what}: chunk_bytes={chunk_bytes!r} must be a number of bytes. HINT: 0 for one chunk, None for what tune "
            "measured or the default."
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: {name} must be a tensor, got {type(tensor).__name__}.")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what}: {name} of shape {tuple(tensor.shape)} has strides {tensor.stride()} and must be contiguous. "
                f"HINT: pass {name}.contiguous(), and copy back what was written to it."
            )
    (first, one), *others = tensors.items()
    for name, other in others:
        if other.dtype != one.dtype or other.device.type != one.device.type:
            raise ValueError(
                f"{what}: {first} is {one.dtype} on {one.device.type} and {name} is {other.dtype} on "
                f"{other.device.type}; both must be the same. HINT: allocate one by the other's new_empty."
            )


def check_multiple(what: str, world_size: int, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
    """That the one has as many times the elements of the other as there are ranks."""
    (whole_name, large), (part_name, small) = whole, part
    if large.numel() != world_size * small.numel():
        raise ValueError(
            f"{what}: {whole_name} has {large.numel()} elements {tuple(large.shape)}; {world_size} ranks with "
            f"{small.numel()} elements {tuple(small.shape)} of {part_name} each make {world_size * small.numel()}. "
            f"HINT: give {whole_name} the shape ({world_size}, *{part_name}.shape); where the elements do not divide "
            "by the ranks, pad them."
        )


def check_summable(what: str, tensor: Tensor) -> None:
    """That gloo and NCCL add such elements up."""
    if tensor.dtype not in MOVABLE and not tensor.is_complex():
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in MOVABLE))
        raise ValueError(
            f"{what}: {tensor.dtype} cannot be summed; expected one of {known}, or complex. HINT: sum a copy in one of "
            "these, torch.int32 for flags."
        )


def check_src(what: str, world_size: int, src: int) -> None:
    """That it is a rank."""
    if type(src) is not int or not 0 <= src < world_size:
        raise ValueError(
            f"{what}: src={src!r} is not one of the ranks 0 .. {world_size - 1}. HINT: src is a rank of the world, not "
            "of a group."
        )


def check_same_call(what: str, groups: ProcessGroups, whole: Tensor, options: dict[str, object]) -> None:
    """Where torch is asked for details: that all ranks make the same call."""
    if not _is_compared(groups):
        return
    told = ", ".join(f"{name}={value!r}" for name, value in options.items())
    calls = _answers(groups, f"{what} of {whole.numel()} elements of {whole.dtype} ({told})")
    if len(calls) > 1:
        raise ValueError(
            f"ranks make different calls: {'; '.join(f'{call} on ranks {ranks}' for call, ranks in calls.items())}. "
            "HINT: every rank has to make the same calls in the same order, of the same sizes, dtypes and options."
        )


@contextmanager
def refused_together(groups: ProcessGroups) -> Iterator[None]:
    """Where torch is asked for details: what one rank refuses is refused on all, which would wait for it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(groups, ProcessGroups) and _is_compared(groups):
            _answers(groups, str(error))
        raise
    if _is_compared(groups):
        refusals = {said: ranks for said, ranks in _answers(groups, "").items() if said}
        if refusals:
            told = "; ".join(f"ranks {ranks}: {said}" for said, ranks in refusals.items())
            raise ValueError(f"this call was refused on other ranks. {told}")


def ranks_by_value(by_rank: Iterable[T]) -> dict[T, list[int]]:
    """Who has which value, the values in the order of the first rank that has each."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(by_rank):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _is_compared(groups: ProcessGroups) -> bool:
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, as torch does in its own collectives."""
    return groups.control is not None and get_debug_level() == DebugLevel.DETAIL


def _answers(groups: ProcessGroups, mine: str) -> dict[str, list[int]]:
    """Which ranks gave which answer. Collective."""
    answers = [""] * groups.topology.world_size
    dist.all_gather_object(answers, mine, group=groups.control)
    return ranks_by_value(answers)
