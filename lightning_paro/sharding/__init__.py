"""PaRO-DP: sharded data parallelism in plain torch. Nothing here knows Lightning."""

from lightning_paro.sharding._consensus import agree
from lightning_paro.sharding._elementwise import ELEMENTWISE
from lightning_paro.sharding._engine import Engine
from lightning_paro.sharding._policy import PrecisionPolicy
from lightning_paro.sharding._state_dict import load_optimizer_state_dict, optimizer_state_dict
from lightning_paro.sharding._units import UnitSpec, embeddings_of, find_units, repeated_blocks
from lightning_paro.sharding._values import parameter_of

__all__ = [
    "ELEMENTWISE",
    "Engine",
    "PrecisionPolicy",
    "UnitSpec",
    "agree",
    "embeddings_of",
    "find_units",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "parameter_of",
    "repeated_blocks",
]
