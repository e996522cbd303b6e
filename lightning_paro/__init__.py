"""Sharded data-parallel training for uneven networks: a plugin for PyTorch Lightning.

Importing the package registers ``paro_nnn`` ... ``paro_ggg``, and ``paro_auto``, as strategy names.
"""

from lightning_paro.__about__ import __version__
from lightning_paro.state_access import Shard, StateAccess, state_access
from lightning_paro.strategies import ParoStrategy, register
from lightning_paro.topology import Granularity, Partition, Topology

__all__ = [
    "Granularity",
    "ParoStrategy",
    "Partition",
    "Shard",
    "StateAccess",
    "Topology",
    "__version__",
    "state_access",
]

register()
