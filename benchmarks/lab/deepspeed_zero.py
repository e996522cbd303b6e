"""DeepSpeed's ZeRO stages and MiCS, if it is installed. Torch's own AdamW: nothing has to be built."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lab.loop import CLIP, Contestant, adamw
from benchmarks.lab.models import block_numel
from benchmarks.lab.rank import Rank

__all__ = ["DeepSpeed"]


class DeepSpeed(Contestant):
    """One stage; ``mics`` shards stage 3 inside a host only. Its buckets hold ``blocks`` blocks."""

    accumulator = "bf16"  # its default: that of the parameters

    def __init__(
        self, rank: Rank, model: nn.Module, blocks: int, stage: int, accumulate: int, mics: bool = False
    ) -> None:
        super().__init__(rank)
        self.leaks = stage == 3
        deepspeed: Any = importlib.import_module("deepspeed")
        bucket = blocks * block_numel(model)
        zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket}
        if stage == 3:
            zero |= {"stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 100_000}
        else:
            zero |= {"allgather_bucket_size": bucket}
        if mics:
            zero |= {"mics_shard_size": rank.topology.group_size}
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulate, "bf16": {"enabled": True},
            "gradient_clipping": CLIP, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9, "wall_clock_breakdown": False,
        }  # fmt: skip
        if mics:  # it has to cut the parameters itself, and is no more part of DeepSpeed 0.19
            deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=config)
        self.module, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config
        )

    def micro_batch(self, batch: Tensor, share: float, is_last: bool) -> Tensor:
        loss = self.forward(batch)
        self.module.backward(loss)  # it divides by the number of micro-batches itself
        with torch.no_grad():  # it changes views of its parameters
            self.module.step()
        return loss

    def step(self, batches: list[Tensor]) -> Tensor:
        return sum(self.micro_batch(batch, 1.0, False).detach() for batch in batches) / len(batches)

    def close(self) -> None:
        self.module.destroy()
