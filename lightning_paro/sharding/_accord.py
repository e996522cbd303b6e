"""What ranks agree on while they train, on the host: who had gradients, which units ran, whether to stop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_paro.collectives import ProcessGroups, Traffic
from lightning_paro.sharding._consensus import agree, different_paths, maximum
from lightning_paro.sharding._flat import Flat
from lightning_paro.topology import Partition

__all__ = ["Accord"]


class Accord:
    """One small exchange at a boundary, a second one if ranks used different parameters, and one where paths change.

    Args:
        names: Of the units, by index.
        partition: The effective partition, for messages.
        groups: The process groups.
        traffic: Where the bytes are counted.
    """

    def __init__(self, names: list[str], partition: Partition, groups: ProcessGroups, traffic: Traffic) -> None:
        self.path: list[int] = []
        """Indices of the units needed since the last boundary; has to be the same on all ranks."""
        self.wants_to_stop = False
        """Whether this rank has to end; the others hear of it at the next boundary."""
        self.all_stop = False
        """Whether some rank had to end by the last boundary: the same on all ranks."""
        self._names = names
        self._partition = partition
        self._groups = groups
        self._traffic = traffic

    def at_boundary(self, flats: list[Flat]) -> None:
        """Tell the flats of a backward which of their parameters had a gradient on any rank.

        Raises:
            RuntimeError: If ranks needed different units; between groups as well, since what they reduced together was
                not the same.
        """
        used = bytes(index in flat.touched for flat in flats for index in flat.indices)
        fingerprint = int.from_bytes(hashlib.blake2b(used, digest_size=7).digest(), "big")  # the same in every process
        mine = torch.tensor([self.wants_to_stop, *self._digest(), fingerprint, -fingerprint])
        stop, *path, largest, smallest = self.maximum(mine, "agreeing on the gradients of a backward").tolist()
        self.all_stop = bool(stop)
        self._check_paths(path)
        self.path.clear()
        anywhere: Sequence[int] = used
        if largest != -smallest:  # not the same on all ranks, which is rare
            told = torch.tensor(list(used), dtype=torch.uint8)
            anywhere = self.maximum(told, "comparing the gradients of a backward", in_step=True).tolist()
        position = 0
        for flat in flats:
            flat.agree_on_used(index for index in flat.indices if anywhere[position + index])
            position += len(flat.slots)

    def compare_paths(self) -> None:
        """Raise on all ranks unless they needed the same units up to now."""
        self._check_paths(self.maximum(torch.tensor(self._digest()), "comparing the units that run").tolist())

    def _digest(self) -> tuple[int, int]:
        """Their maximum over ranks tells whether all have the same."""
        digest = hash(tuple(self.path)) >> 1  # of numbers: the same in every process
        return digest, -digest

    def _check_paths(self, digests: list[int]) -> None:
        if digests[0] != -digests[1]:
            path = [self._names[index] for index in self.path]
            self.path.clear()
            raise different_paths(agree(self._groups, "comparing the units that ran", lambda: path), self._partition)

    def maximum(self, mine: Tensor, what: str, in_step: bool = False) -> Tensor:
        """The elementwise maximum of an integer host tensor over all ranks, in place, counted as control traffic."""
        return maximum(self._groups, mine, what, in_step, self._traffic)
