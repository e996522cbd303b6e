"""The engine by which a module is sharded just now, so that one left sharded by a failed run can be picked up again.

The module owns it, so both are freed together.
"""

from __future__ import annotations

from torch import nn

from lightning_paro.sharding import Engine

__all__ = ["engine_of", "forget", "keep"]

_NAME = "_paro_engine"


class _Owned:
    """What the module has; a copy of it, or one that was pickled, has nothing."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Owned], tuple[()]]:
        return _Owned, ()


def keep(module: nn.Module, engine: Engine) -> None:
    """From here on ``module`` is sharded by ``engine``."""
    vars(module)[_NAME] = _Owned(engine)


def engine_of(module: nn.Module | None) -> Engine | None:
    """The engine that shards ``module``, if one does."""
    owned = vars(module).get(_NAME) if module is not None else None
    engine = owned.engine if owned is not None else None
    return engine if engine is not None and engine.module is module else None


def forget(module: nn.Module) -> Engine | None:
    """``module`` is not sharded any more, or its engine is about to be closed; returns that."""
    engine = engine_of(module)
    vars(module).pop(_NAME, None)
    return engine
