"""What LISA's arguments may be."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from lightning_paro.algorithms.sampling import SCORED

__all__ = ["check_arguments"]

WHEN = ("always", "sampled", "never")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse what is not understood.

    Args:
        arguments: LISA's, by name; the memory budget is not among them, its own parser refuses what it does not know.
    """
    for name, least in (("num_layers", 0), ("interval", 1), ("warmup", 0), ("seed", None)):
        _integer(name, arguments[name], least)
    _paths(arguments["layers"])
    if not callable(arguments["sampler"]):
        _one_of("sampler", arguments["sampler"], ("uniform", "cyclic", *SCORED), " or a callable")
    _one_of("state_policy", arguments["state_policy"], ("drop_frozen", "reset_all", "offload", "keep"))
    _one_of("train_embeddings", arguments["train_embeddings"], WHEN)
    _one_of("train_head", arguments["train_head"], WHEN)
    if not isinstance(arguments["keep_master"], bool):
        raise ValueError(f"keep_master={arguments['keep_master']!r} is not understood: expected True or False.")


def _integer(name: str, value: Any, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and int(value) < least):
        raise ValueError(f"{name}={value!r} must be an integer{'' if least is None else f', {least} or more'}.")


def _one_of(name: str, value: Any, known: Sequence[str], other: str = "") -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is not understood: expected one of {', '.join(map(repr, known))}{other}.")


def _paths(layers: Any) -> None:
    paths = [layers] if isinstance(layers, str) else layers
    if not (isinstance(paths, (list, tuple)) and paths and all(isinstance(path, str) for path in paths)):
        raise ValueError(
            f"layers={layers!r} is not understood: expected 'auto', or the path of the list that holds the layers, or "
            "a list of paths. HINT: for example layers='model.layers'."
        )
    if len(paths) > 1 and "auto" in paths:
        raise ValueError(f"layers={layers!r}: 'auto' finds all layers by itself. HINT: layers='auto', or the paths.")
