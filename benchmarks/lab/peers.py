"""The peers of torch itself, each as its documentation says and at its best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.lab.loop import CLIP, LR, Contestant, adamw, short
from benchmarks.lab.models import block_numel, stack_of
from benchmarks.lab.rank import Rank

__all__ = ["DDP", "FSDP", "FullyShard", "Group"]

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(rank: Rank, *shape: int) -> DeviceMesh:
    """A device mesh, made once: its communicators cost seconds."""
    if shape not in _meshes:
        names = ("replicate", "shard")[-len(shape) :]
        _meshes[shape] = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
    return _meshes[shape]


class DDP(Contestant):
    """DistributedDataParallel in bf16-mixed; with ``zero``, ZeroRedundancyOptimizer shards the optimizer's state.

    Buckets hold ``blocks`` blocks. ``bf16_wire`` compresses gradients on the wire, as its peers do.
    """

    accumulator = "fp32, N"
    autocast = True

    def __init__(self, rank: Rank, model: nn.Module, blocks: int, zero: bool = False, bf16_wire: bool = False) -> None:
        super().__init__(rank)
        self.module = nn.parallel.DistributedDataParallel(
            model, device_ids=[rank.device.index] if rank.on_gpu else None, gradient_as_bucket_view=True,
            bucket_cap_mb=blocks * block_numel(model) * 4 / 2**20,
        )  # fmt: skip
        if bf16_wire:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            self.module.register_comm_hook(None, bf16_compress_hook)
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
            )
        else:
            self.optimizer = adamw(model.parameters())

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        with nullcontext() if is_last else self.module.no_sync():
            return super().micro_batch(batch, share, is_last)


class Group(nn.ModuleList):
    """Consecutive blocks that are wrapped as one."""

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self:
            hidden = block(hidden, *args, **kwargs)
        return hidden


def groups_of(model: nn.Module, blocks: int) -> Iterator[list[nn.Module]]:
    """The blocks of a model, ``blocks`` at a time."""
    parent, name = stack_of(model)
    stack = list(getattr(parent, name))
    for start in range(0, len(stack), blocks):
        yield stack[start : start + blocks]


class FSDP(Contestant):
    """FullyShardedDataParallel; its units are ``blocks`` blocks.

    Without ``sync`` gradients are only reduced in the last micro-batch: faster, and each rank then holds them whole.
    """

    def __init__(self, rank: Rank, model: nn.Module, blocks: int, strategy: str, sync: bool = True) -> None:
        super().__init__(rank)
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        parent, name = stack_of(model)
        setattr(parent, name, nn.ModuleList(Group(group) for group in groups_of(model, blocks)))
        topology = rank.topology
        hybrid = strategy == "HYBRID_SHARD"
        shape = (topology.num_groups, topology.group_size) if hybrid else (topology.world_size,)
        self.sync = sync
        self.accumulator = "fp32, shard" if sync else f"{short(self.compute)}, N"
        self.module = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Group}), sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(param_dtype=self.compute, reduce_dtype=self.compute),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE, use_orig_params=True, device_mesh=mesh_of(rank, *shape),
            device_id=rank.device,
        )  # fmt: skip
        self.optimizer = adamw(self.module.parameters())

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        around: AbstractContextManager[Any] = nullcontext()
        if not is_last and not self.sync:
            around = self.module.no_sync()
        with around:
            return super().micro_batch(batch, share, is_last)

    def clip(self) -> None:
        self.module.clip_grad_norm_(CLIP)


class FullyShard(Contestant):
    """fully_shard over all ranks or, with ``mesh=2``, inside hosts with replicas between them.

    Its units are ``blocks`` blocks. ``sync`` is what happens before the last micro-batch: ``"every"`` reduces all the
    way, ``"inside"`` (2-D only) leaves out the all-reduce between hosts, ``"none"`` keeps whole gradients.
    """

    def __init__(self, rank: Rank, model: nn.Module, blocks: int, mesh: int = 1, sync: str = "every") -> None:
        super().__init__(rank)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        topology = rank.topology
        shape = (topology.world_size,) if mesh == 1 else (topology.num_groups, topology.group_size)
        options: dict[str, Any] = {
            "mesh": mesh_of(rank, *shape),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.compute),
        }
        self.sync = sync
        low = short(self.compute)
        self.accumulator = {"every": "fp32, shard", "inside": f"{low}, shard", "none": f"{low}, N"}[sync]
        for group in groups_of(model, blocks):
            fully_shard(group if len(group) > 1 else group[0], **options)
        self.module = fully_shard(model, **options)
        self.optimizer = adamw(model.parameters())

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        module: Any = self.module
        if self.sync == "inside":
            module.set_requires_all_reduce(is_last)
        elif self.sync == "none":
            module.set_is_last_backward(is_last)
            module.set_requires_gradient_sync(is_last)
        return super().micro_batch(batch, share, is_last)

    def clip(self) -> None:
        parameters = list(self.module.parameters())
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm.full_tensor())
