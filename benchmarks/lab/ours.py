"""The engine of this package, in a plain loop; and the two parts of the limit that it is measured against."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lab.loop import CLIP, Contestant, adamw, short
from benchmarks.lab.models import block_numel
from benchmarks.lab.rank import Rank
from lightning_paro.sharding import Engine, PrecisionPolicy
from lightning_paro.topology import Partition

__all__ = ["Floor", "Legs", "Paro"]


class Paro(Contestant):
    """The engine, by partition; ``blocks`` of the model's blocks travel in one launch.

    With ``low`` micro-batches are accumulated in the compute dtype, as some of the peers do.
    """

    def __init__(
        self, rank: Rank, model: nn.Module, blocks: int, partition: str, autocast: bool = False, low: bool = False
    ) -> None:
        super().__init__(rank)
        self.module, self.autocast = model, autocast
        sized: dict[str, Any] = {}
        if "bucket_bytes" in inspect.signature(Engine).parameters:
            sized["bucket_bytes"] = int(1.01 * blocks * block_numel(model) * self.compute.itemsize)  # and padding
        accumulator = self.compute if low else torch.float32
        policy = PrecisionPolicy(
            self.compute, master_weights=self.compute is not torch.float32, accumulator_dtype=accumulator
        )
        self.engine = Engine(
            model, Partition.parse(partition), rank.groups, policy=policy, device=rank.device, **sized
        )  # fmt: skip
        self.optimizer = adamw(model.parameters())
        self.shards = self.engine.attach(self.optimizer)
        self.accumulator = f"{short(accumulator)}, {self.engine.partition.g.name}"

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        self.engine.step_begin()
        loss = self.forward(batch)
        self.engine.step_end(backward_follows=True)
        self.mark()
        self.engine.sync_gradients = is_last
        self.engine.backward_begin()
        (loss * share).backward()
        self.engine.backward_end()
        self.mark()
        return loss

    def clip(self) -> None:
        norm = self.engine.grad_norm(self.optimizer)
        gradients = self.shards.gradients()
        if gradients:
            torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))

    def counts(self) -> dict[str, Any]:
        traffic, steps = self.engine.traffic, self.steps
        return {
            "runs_as": str(self.engine.partition), "state_bytes": self.engine.model_state_bytes(),
            "intra_bytes": traffic.intra // steps, "inter_bytes": traffic.inter // steps,
            "launches": traffic.calls // steps,
        }  # fmt: skip

    def close(self) -> None:
        self.engine.abandon()


class Floor(Contestant):
    """The compute floor: every rank alone, all at once. No communication, and nothing is sharded.

    Parameters and accumulated gradients in the compute dtype, a whole fp32 master and AdamW on it. The ranks of a GPU
    share it as they do in every other row. An update of one shard only would be faster by a few milliseconds.
    """

    def __init__(self, rank: Rank, model: nn.Module, blocks: int) -> None:
        super().__init__(rank)
        self.accumulator = f"{short(self.compute)}, N"
        self.masters = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():  # and no buffers: none of the others casts them
            parameter.data = parameter.data.to(self.compute)
        self.module = model
        self.optimizer = adamw(self.masters)

    def clip(self) -> None:
        for master, parameter in zip(self.masters, self.module.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.masters, CLIP)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            torch._foreach_copy_(list(self.module.parameters()), self.masters)


class Legs(Contestant):
    """The boundary legs alone: I-shards reduce-scattered and all-gathered between hosts, all columns at once.

    In pieces of the I-shard of ``blocks`` blocks, in the compute dtype; the pieces of a leg follow one another.
    """

    accumulator = ""

    def __init__(self, rank: Rank, model: nn.Module, blocks: int) -> None:
        super().__init__(rank)
        from lightning_paro.collectives._legs import Legs as Launches

        self.legs = Launches(rank.groups, rank.device)
        world, m = rank.topology.world_size, rank.topology.group_size
        numel = sum(parameter.numel() for parameter in model.parameters())
        piece = -(-blocks * block_numel(model) // world) * rank.topology.num_groups
        whole = -(-numel // world) * rank.topology.num_groups  # an I-shard, padded
        self.pieces = [min(piece, whole - start) for start in range(0, whole, piece)]
        self.piece_bytes = piece * self.compute.itemsize
        self.buffer = torch.zeros(piece, dtype=self.compute, device=rank.device)
        self.shard = torch.zeros(piece // rank.topology.num_groups, dtype=self.compute, device=rank.device)
        assert m * whole >= numel

    def step(self, batches: list[Tensor]) -> Tensor:
        ng = self.rank.topology.num_groups
        for move in (self._reduce, self._gather):
            for piece in self.pieces:
                self.legs.lanes.start(move(self.buffer[:piece], self.shard[: piece // ng]), "legs").wait()
        return torch.zeros((), device=self.rank.device)

    def _reduce(self, whole: Tensor, shard: Tensor) -> Iterator[Any]:
        yield "inter"
        yield from self.legs.scatter("inter", [shard], [whole])

    def _gather(self, whole: Tensor, shard: Tensor) -> Iterator[Any]:
        yield "inter"
        yield self.legs.gather("inter", [whole], [shard])

    def counts(self) -> dict[str, Any]:
        return {"piece_bytes": self.piece_bytes}
