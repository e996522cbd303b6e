"""Loading a sharded checkpoint that holds optimizer state of some parameters only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

__all__ = ["expect_state_of_all", "expect_state_of_some"]

_STATE = re.compile(r"optimizer_\d+\.state\.(?P<name>.+)\.[^.]+")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


def expect_state_of_some(strategy: Strategy, parameters: Mapping[str, nn.Parameter]) -> None:
    """Freeze, while a sharded checkpoint is loaded, parameters that it has no optimizer state of.

    torch loads into state that it makes first for all parameters that require a gradient, and fails where the
    checkpoint has none.
    """
    if strategy.lightning_restore_optimizer:
        return
    load = strategy.load_checkpoint

    def prepared(path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if (Path(path) / ".metadata").is_file():
            keys = FileSystemReader(path).read_metadata().state_dict_metadata
            held = {match["name"] for match in map(_STATE.fullmatch, keys) if match}
            for name, parameter in parameters.items():
                parameter.requires_grad_(_WRAPPERS.sub("", name) in held)
        try:
            return load(path, *args, **kwargs)
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(True)

    strategy.load_checkpoint = prepared  # type: ignore[assignment, method-assign]


def expect_state_of_all(strategy: Strategy) -> None:
    """End :func:`expect_state_of_some`."""
    vars(strategy).pop("load_checkpoint", None)
