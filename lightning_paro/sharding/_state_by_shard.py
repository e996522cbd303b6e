"""The state of an attached optimizer, which is kept by this rank's shards and asked for by the module's parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import Self

from lightning_paro.topology import Granularity

if TYPE_CHECKING:
    from lightning_paro.sharding._engine import Engine

__all__ = ["StateByShard"]

_MISSING = object()


class StateByShard(defaultdict[Any, Any]):
    """``optimizer.state``: a plain one holds nothing by the module's parameters, which would go unnoticed.

    Where the optimizer's state is whole on every rank (os=N), whoever asks by a parameter gets that of its entry.
    Where it is partitioned only forgetting it makes sense by parameter; all else raises, on all ranks alike.

    Args:
        state: The optimizer's state up to now.
        engine: Knows which parameters are the module's, and their entries.
    """

    def __init__(self, state: Mapping[Any, Any], engine: Engine) -> None:
        super().__init__(dict)
        self._engine = weakref.ref(engine)
        self.update(state)

    def __missing__(self, key: Any) -> Any:
        entry = self._entry(key)
        return super().__missing__(key) if entry is key else self[entry]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._entry(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._entry(key), value)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def update(self, other: Any = (), /, **more: Any) -> None:
        """As of a dict."""
        for key, value in dict(other, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """A plain one, by entries."""
        return defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of an entry, or of a parameter where state is whole."""
        return super().get(self._entry(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of an entry, or of a parameter where state is whole."""
        return super().setdefault(self._entry(key), default)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Forget the state of an entry or a parameter; the next step begins anew with it.

        Of a parameter of which nothing lies on this rank it is the default, or empty.
        """
        entry = self._entry(key, is_read=False)
        if default is _MISSING and (entry is key or entry is not None):
            return super().pop(entry)
        return super().pop(entry, {} if default is _MISSING else default)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def _entry(self, key: Any, is_read: bool = True) -> Any:
        """What state is kept by: the key itself unless it is a parameter; None if this rank has nothing of that."""
        engine = self._engine()
        if engine is None or not isinstance(key, Tensor) or id(key) not in engine.where:
            return key
        flat, index = engine.where[id(key)]
        if is_read and engine.partition.os is not Granularity.N:
            raise RuntimeError(
                f"the optimizer's state of parameter '{flat.slots[index].name}' lies in shards over the ranks, so it "
                "cannot be asked for by parameter. HINT: `lightning_paro.state_access(trainer).trainable_shards()` "
                "hands out this rank's shards with their state; `optimizer.state.pop(parameter, None)` forgets it; "
                "strategy='paro_nnn' keeps it whole."
            )
        return flat.entry(index)
