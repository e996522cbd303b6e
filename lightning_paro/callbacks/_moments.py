"""What becomes of the optimizer state of layers that are not trained: forgotten, kept, or moved to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["Offloaded"]

States = dict[str, dict[str, Any]]
"""By parameter name, the live state of an optimizer."""


class Offloaded:
    """Moves optimizer state between a device and pinned host memory, beside the computation.

    The tensors stay in the optimizer's state, where a checkpoint finds them; only where they lie changes.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._coming: list[tuple[dict[str, Any], str, Tensor]] = []  # a state, its key, and what will stand there

    def evict(self, states: States) -> None:
        """Move state to the host; the device's memory is free once the copies are done."""
        self.arrive()
        for state in states.values():
            for key, value in state.items():
                if _moves(value):
                    state[key] = _with_local(value, self._to_host(_local(value)))

    def fetch(self, states: States, device: torch.device) -> None:
        """Begin to bring state back to the device."""
        for state in states.values():
            for key, value in state.items():
                if _moves(value) and _local(value).device != device:
                    self._coming.append((state, key, self._to_device(_local(value), device)))

    def arrive(self) -> None:
        """Have what was fetched on the device; what is computed from now on waits for the copies."""
        if self._coming and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        for state, key, arrived in self._coming:
            state[key] = _with_local(state[key], arrived)
        self._coming.clear()

    def synchronize(self) -> None:
        """Wait on the host until all copies are done, before somebody reads them there."""
        if self._stream is not None:
            self._stream.synchronize()

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not handed out again before the copy is done
        return host

    def _to_device(self, host: Tensor, device: torch.device) -> Tensor:
        arriving = torch.empty(host.shape, dtype=host.dtype, device=device)
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream())  # the memory may have been somebody else's until now
        with torch.cuda.stream(stream):
            arriving.copy_(host, non_blocking=True)
        arriving.record_stream(stream)
        return arriving

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


def _moves(value: Any) -> bool:
    """Counters stay where the optimizer put them."""
    return isinstance(value, Tensor) and value.numel() > 1


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def _with_local(value: Tensor, local: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
