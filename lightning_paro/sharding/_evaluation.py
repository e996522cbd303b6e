"""Loops without training, in which ranks may run any number of forwards: uneven batches, ``generate()``."""

from __future__ import annotations

import torch

from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding._consensus import maximum
from lightning_paro.sharding._unit import Unit
from lightning_paro.topology import Granularity

__all__ = ["Evaluation"]


class Evaluation:
    """Keeps a model usable while ranks are out of step.

    Where they fit, all units stay whole for the loop. Otherwise it is *joint*: a unit is gathered when some rank needs
    it, in rounds in which all ranks take part, those that are done as well.

    Args:
        units: All units of the engine.
        rest: Those without a module of their own, whole in any case.
        groups: The process groups.
    """

    def __init__(self, units: list[Unit], rest: list[Unit], groups: ProcessGroups) -> None:
        self.is_running = self.is_joint = False
        self._units = units
        self._rest = rest
        self._groups = groups
        self._held: list[Unit] = []
        self._p = units[0].flats[0].partition.p if units else Granularity.N

    def begin(self, whole: bool | None = None) -> None:
        """Start of a loop. Collective.

        Args:
            whole: Whether all units stay whole until :meth:`end`; None decides by memory: whole, unless that would take
                more than half of what is free on some GPU.
        """
        if whole is None:
            whole = not maximum(self._groups, torch.tensor([self._is_too_large()]), "measuring free memory").any()
        self.is_running = True
        self._held = self._units if whole else self._rest
        for unit in self._held:
            unit.hold()
            for flat in unit.flats:
                flat.settle()
        self.is_joint = not whole

    def join(self) -> None:
        """This rank has no more batches: help the others to gather until all are done."""
        while self.is_joint and self.gather(None):
            pass

    def end(self) -> None:
        """End of the loop. Collective."""
        self.join()
        self.is_running = self.is_joint = False
        for unit in self._held:
            unit.let_go()
        self._held = []

    def gather(self, wanted: Unit | None) -> bool:
        """One round: every rank names the unit it needs next, or None, and all take part in gathering them.

        Returns:
            Whether any rank needed a unit.
        """
        topology, rank = self._groups.topology, self._groups.rank
        wishes = torch.full((topology.world_size,), -1)
        wishes[rank] = -1 if wanted is None else wanted.index
        maximum(self._groups, wishes, "choosing the units to gather in evaluation", in_step=True)
        partners = list(range(topology.world_size))
        if self._p is Granularity.I:
            partners = topology.intra_ranks(topology.coordinates(rank)[0])
        for index in sorted(set(wishes[partners].tolist()) - {-1}):
            for flat in self._units[index].flats:
                was_whole = flat.is_whole  # another unit may run inside this one
                flat.gather(again=True)
                if self._units[index] is not wanted and not was_whole:
                    flat.release()
        return bool((wishes >= 0).any())

    def _is_too_large(self) -> int:
        flats = [flat for unit in self._units for flat in unit.flats]
        if not flats or flats[0].device.type != "cuda" or self._p is Granularity.N:
            return 0
        device = flats[0].device
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(2 * sum(flat.numel * flat.dtype.itemsize for flat in flats) > free)
