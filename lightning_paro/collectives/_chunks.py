"""How large the chunks are that a two-level collective is cut into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT_CHUNK_BYTES", "ChunkPlan", "pieces"]

DEFAULT_CHUNK_BYTES = 4 * 2**20
"""Bytes of a chunk where nobody has measured with :func:`tune`: a guess for links of some Gbit/s."""


@dataclass(frozen=True)
class ChunkPlan:
    """What :func:`tune` measured, the same on all ranks.

    Attributes:
        seconds: By operation, bytes of the whole tensor and ``chunk_bytes``: seconds of the slowest rank.
    """

    seconds: Mapping[str, Mapping[int, Mapping[int, float]]]

    def chunk_bytes(self, operation: str, nbytes: int) -> int:
        """The fastest of the chunk sizes that were tried, at the measured size nearest to ``nbytes``.

        Args:
            operation: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"broadcast"``.
            nbytes: Bytes of the whole tensor.
        """
        sizes = self.seconds.get(operation)
        if not sizes:
            return DEFAULT_CHUNK_BYTES
        nearest = min(sizes, key=lambda size: abs(math.log(size / max(nbytes, 1))))
        tried = sizes[nearest]
        return min(tried, key=lambda chunk: tried[chunk])


def pieces(length: int, longest: int, unit: int) -> list[slice]:
    """Cut ``length`` elements into pieces of nearly one length, in units, of at most ``longest`` or of one unit.

    The first piece is the longest; only the last may end inside a unit. ``longest=0`` is one piece.
    """
    if longest == 0 or length <= longest:
        return [slice(0, length)]
    units = -(-length // unit)
    count = -(-units // max(longest // unit, 1))
    size = -(-units // count) * unit
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
