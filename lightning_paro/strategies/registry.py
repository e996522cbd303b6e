"""The names ``paro_nnn`` ... ``paro_ggg`` and ``paro_auto`` in Lightning's StrategyRegistry."""

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
    """Register the 14 strategies, ``paro_auto``, and the 13 names that are refused with the reason. Idempotent.

    Lightning's own error for a name it does not know lists no plugin, so the refused names are registered too.
    """
    names = [*map(str, Partition.valid()), "auto"]
    for name in names:
        _add(StrategyRegistry, f"paro_{name}", ParoStrategy, f"PaRO-DP with partition {name}", partition=name)
    for name in Partition.refused():
        _add(StrategyRegistry, f"paro_{name}", partial(_refuse, name), "not a useful partition")
    other = sys.modules.get(f"{_OTHER_NAMESPACE}.strategies")
    if other is not None:  # the standalone package has a registry of its own: say so instead of "unknown name"
        for name in names:
            _add(other.StrategyRegistry, f"paro_{name}", _wrong_namespace, "of the package lightning only")


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
