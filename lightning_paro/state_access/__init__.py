"""How callbacks reach model state without asking which strategy holds it."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lightning_paro.sharding import parameter_of
from lightning_paro.state_access._fsdp import FlatParameters, ShardedTensors
from lightning_paro.state_access._optimizers import is_elementwise
from lightning_paro.state_access._paro import PartitionedState
from lightning_paro.state_access._protocol import Shard, StateAccess
from lightning_paro.state_access._replicated import ReplicatedState, no_longer_postponed, postpone_ddp
from lightning_paro.strategies import ParoStrategy

__all__ = [
    "Shard", "StateAccess", "is_elementwise", "no_longer_postponed", "parameter_of", "postpone_ddp", "state_access",
]  # fmt: skip


def state_access(trainer: Trainer) -> StateAccess:
    """Access to the model state of a running Trainer.

    Raises:
        NotImplementedError: If there is no adapter for the strategy.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParoStrategy):
        return PartitionedState(strategy.engine)
    if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return ReplicatedState(strategy)
    if isinstance(strategy, ModelParallelStrategy):
        return ShardedTensors(strategy)
    if isinstance(strategy, FSDPStrategy):
        return FlatParameters(strategy)
    raise NotImplementedError(
        f"state_access does not know {type(strategy).__name__}; expected ParoStrategy, DDPStrategy, "
        "ModelParallelStrategy, FSDPStrategy or SingleDeviceStrategy. HINT: train with strategy='paro_ggg' where you "
        "would use DeepSpeed's stage 3, with 'paro_nng' for its stage 1."
    )
