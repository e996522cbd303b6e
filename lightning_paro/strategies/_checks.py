"""What ParoStrategy refuses, with the remedy, before anything is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

__all__ = ["check_placement", "check_state_dict", "check_trainer"]


def check_trainer(trainer: Trainer, module: nn.Module) -> None:
    """Refuse what would be silently wrong on shards.

    Raises:
        TypeError: If the Trainer, the module or a callback comes from ``pytorch_lightning``.
        ValueError: If a callback averages weights.
    """
    for thing, kind in ((trainer, Trainer), (module, LightningModule)):
        if not isinstance(thing, kind):
            raise TypeError(
                f"ParoStrategy expects a {kind.__module__}.{kind.__name__}, got {type(thing).__module__}."
                f"{type(thing).__name__}. HINT: import everything from `lightning.pytorch`, not `pytorch_lightning`."
            )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in type(callback).__mro__):
            raise TypeError(
                f"the Trainer is of the package lightning, but its callback {type(callback).__name__} is of "
                "pytorch_lightning, whose classes are different objects. HINT: import everything from "
                "`lightning.pytorch`."
            )
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages the module's parameters, which ParoStrategy keeps in shards: the "
                "average would be of released values. HINT: remove the callback, or train with strategy='ddp'."
            )


def check_placement(group_size: int, per_host: int, num_hosts: int) -> str | None:
    """A warning if a group spans hosts: the fast network would then be the slow one."""
    if num_hosts == 1 or per_host % group_size == 0:
        return None
    hosts: dict[int, set[int]] = {}
    for rank in range(per_host * num_hosts):
        hosts.setdefault(rank // group_size, set()).add(rank // per_host)
    placement = ", ".join(f"group {i} on hosts {sorted(h)}" for i, h in hosts.items() if len(h) > 1)
    return (
        f"group_size={group_size} with {per_host} ranks per host makes groups that span hosts ({placement}); "
        f"collectives inside a group will cross the slow network. HINT: use a group_size that divides {per_host}."
    )


def check_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Compare a checkpoint's weights with the module before loading them.

    Raises:
        ValueError: With the first differing names and shapes, the same on all ranks.
    """
    own = module.state_dict()
    lines = [
        f"  '{name}': {tuple(state[name].shape)} in the checkpoint, {tuple(value.shape)} in the model"
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
        and isinstance(state.get(name), torch.Tensor)
        and state[name].shape != value.shape
    ]
    if strict:
        lines += [f"  '{name}': only in the model" for name in own if name not in state]
        lines += [f"  '{name}': only in the checkpoint" for name in state if name not in own]
    if lines:
        shown = "\n".join(lines[:6]) + (f"\n  ... and {len(lines) - 6} more" if len(lines) > 6 else "")
        raise ValueError(
            f"the checkpoint is of another architecture than {type(module).__name__}, {len(lines)} entries differ:\n"
            f"{shown}\nHINT: build the model with the configuration it was trained with; set `strict_loading = False` "
            "on the LightningModule to ignore missing names."
        )
