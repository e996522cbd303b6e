"""Buffers of the module: rank 0's win, as in DDP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_paro.collectives import ProcessGroups, Traffic
from lightning_paro.collectives._compat import broadcast

__all__ = ["Buffers"]


class Buffers:
    """Broadcasts a module's buffers, all at the start and the persistent ones before each forward.

    Args:
        module: The module.
        groups: The process groups.
        traffic: Where the bytes are counted.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups, traffic: Traffic) -> None:
        self._module = module
        self._is_alone = groups.topology.world_size == 1
        self._traffic = traffic
        self._modules: list[nn.Module] = []

    def sync_all(self) -> None:
        """Every buffer."""
        self._sync(list(self._module.buffers()))

    def sync_persistent(self) -> None:
        """Those that a checkpoint keeps, running statistics among them; the others are constants."""
        if self._is_alone:
            return
        if not self._modules:  # by now callbacks and hooks at the start of the run have added theirs
            self._modules = list(self._module.modules())
        self._sync(
            [
                buffer
                for module in self._modules
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            ]
        )

    def _sync(self, buffers: list[Tensor]) -> None:
        if self._is_alone:
            return
        with torch.no_grad():
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                alike = [buffer for buffer in buffers if buffer.dtype is dtype]
                flat = torch.cat([buffer.reshape(-1) for buffer in alike])
                broadcast(flat, src=0)
                self._traffic.control += flat.nbytes
                for buffer, part in zip(alike, flat.split([b.numel() for b in alike]), strict=True):
                    buffer.copy_(part.view(buffer.shape))
