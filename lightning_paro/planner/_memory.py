"""How much memory a rank may use."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["FreeMemory", "free_memory", "smallest_share"]

MEMINFO = Path("/proc/meminfo")


class FreeMemory(NamedTuple):
    """What one rank sees of a memory that it may share with others.

    Attributes:
        place: Names the memory: the host, and the device.
        free: Bytes that nobody uses.
        own: Bytes that this rank's allocator holds already.
    """

    place: tuple[str, str]
    free: int
    own: int


def free_memory(device: torch.device | str) -> FreeMemory:
    """Look at the memory of a device: a GPU's, or for the CPU that of the host.

    Raises:
        OSError: If this system does not say how much memory its host has.
    """
    device = torch.device(device)
    host = socket.gethostname()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return FreeMemory((host, uuid), free, torch.cuda.memory_reserved(device))
    try:
        (line,) = (line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        raise OSError(
            f"{MEMINFO} does not say how much memory this host has. HINT: give the bytes that a rank may use, for "
            "example ParoStrategy('auto', memory=16e9)."
        ) from None
    return FreeMemory((host, device.type), int(line.split()[1]) * 1024, 0)


def smallest_share(ranks: Sequence[FreeMemory]) -> int:
    """Bytes that every rank can use if those that share a memory share it equally."""
    places: dict[tuple[str, str], list[FreeMemory]] = {}
    for rank in ranks:
        places.setdefault(rank.place, []).append(rank)
    return min(
        (min(rank.free for rank in sharing) + sum(rank.own for rank in sharing)) // len(sharing)
        for sharing in places.values()
    )
