"""The names ``paro_nnn`` ... ``paro_ggg`` in Lightning's StrategyRegistry."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch.strategies import StrategyRegistry

from lightning_paro.strategies.paro import ParoStrategy
from lightning_paro.topology import Partition

__all__ = ["register"]

_OTHER_NAMESPACE = "pytorch_lightning"


def register() -> None:
    """Register the 14 strategies, and the 13 names that are refused with the reason. Idempotent.

    Lightning's own error for a name it does not know lists no plugin, so the refused names are registered too.
    """
    for partition in Partition.valid():
        _add(
            StrategyRegistry,
            f"paro_{partition}",
            ParoStrategy,
            f"PaRO-DP with partition {partition}",
            partition=str(partition),
        )
    for name in Partition.refused():
        _add(StrategyRegistry, f"paro_{name}", partial(_refuse, name), "not a useful partition")
    other = sys.modules.get(f"{_OTHER_NAMESPACE}.strategies")
    if other is not None:  # the standalone package has a registry of its own: say so instead of "unknown name"
        for partition in Partition.valid():
            _add(other.StrategyRegistry, f"paro_{partition}", _wrong_namespace, "of the package lightning only")


def _add(registry: Any, name: str, factory: Any, description: str, **init_params: Any) -> None:
    if name not in registry:
        registry.register(name, factory, description=description, **init_params)


def _refuse(name: str) -> NoReturn:
    Partition.parse(name)
    raise AssertionError(f"{name} is a valid partition")


def _wrong_namespace(**_: Any) -> NoReturn:
    raise TypeError(
        "lightning_paro works with `lightning.pytorch`, but this Trainer comes from the standalone package "
        "`pytorch_lightning`, whose classes are different objects. HINT: import everything from `lightning.pytorch`."
    )
