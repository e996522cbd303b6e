"""How the ranks of a Trainer are started, named and brought together; nothing here is about sharding."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero as fabric_rank_zero
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero as pytorch_rank_zero
from torch import Tensor
from typing_extensions import override

__all__ = ["ProcessesStrategy", "one_of"]


class ProcessesStrategy(ParallelStrategy):
    """One process per device, started by Lightning, torchrun or SLURM.

    Args:
        process_group_backend: ``"nccl"``, ``"gloo"`` or None for the device's default.
        timeout: How long a collective may wait.
        start_method: How Lightning starts the processes.
        kwargs: As in Lightning's strategies.
    """

    def __init__(
        self, *, process_group_backend: str | None, timeout: timedelta | None, start_method: Any, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        one_of("start_method", start_method, ("popen", "spawn", "fork", "forkserver"))
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Lightning injects a DistributedSampler and syncs metrics only for strategies that say this."""
        return True

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the process groups."""
        return self._process_group_backend

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._start_method == "fork" and isinstance(self._launcher, _MultiProcessingLauncher):
            torch.set_num_threads(1)  # the parent's OpenMP threads are not here: a parallel region would hang
        reset_seed()
        self.set_world_ranks()
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(self.root_device)
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and everything that prints on rank 0 only, who this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for namespace in (fabric_rank_zero, pytorch_rank_zero):
            namespace.rank_zero_only.rank = self.global_rank

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        on_gpu = self.root_device.type == "cuda" and self._process_group_backend == "nccl"
        torch.distributed.barrier(device_ids=[self.root_device.index] if on_gpu else None)


def one_of(argument: str, value: object, valid: tuple[str, ...]) -> None:
    """Refuse a value that is not among the valid ones."""
    if value not in valid:
        raise ValueError(f"{argument}={value!r} is not understood: expected one of {', '.join(map(repr, valid))}.")
