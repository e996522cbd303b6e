"""An optimizer on shards, saved as the plain optimizer it would be in one process, and loaded from such a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_paro.sharding._consensus import agree
from lightning_paro.sharding._engine import Engine
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._optimizer import OptimizerShards, part_of_state
from lightning_paro.topology import Granularity

__all__ = ["load_optimizer_state_dict", "optimizer_state_dict"]


def optimizer_state_dict(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state of an optimizer, keyed by parameter number as torch does it. Collective.

    Args:
        engine: The engine, open or closed.
        optimizer: An attached optimizer.

    Returns:
        On rank 0 the state with every tensor whole on the host; an empty dict on the other ranks.
    """
    shards = engine.shards_of(optimizer)
    here = engine.groups.rank == 0
    if engine.partition.os is Granularity.N:
        return _to_host(shards.optimizer.state_dict()) if here else {}

    members = list(shards.members())
    kinds = agree(engine.groups, "saving the optimizer", lambda: [_kinds(shards, *member) for member in members])
    merged = [next((kind for kind in kind_by_rank if kind), {}) for kind_by_rank in zip(*kinds, strict=True)]
    state: dict[int, dict[str, Any]] = {
        number: {key: None if isinstance(value, torch.dtype) else value for key, value in kind.items()}
        for number, kind in enumerate(merged)
        if kind
    }
    for flat in shards.flats():
        numbers = {index: number for number, (owner, index) in enumerate(members) if owner is flat}
        keys = {
            key: value for n in numbers.values() for key, value in merged[n].items() if isinstance(value, torch.dtype)
        }
        for key, dtype in keys.items():
            whole = flat.expand(_collect(shards, flat, key, dtype))
            if here:
                for index, number in numbers.items():
                    if key in state.get(number, {}):
                        slot = flat.slots[index]
                        part = whole[slot.start : slot.start + slot.numel]
                        state[number][key] = part.to("cpu", copy=True).view(slot.shape)
    if not here:
        return {}
    groups, start = [], 0
    for live, group in zip(shards.optimizer.param_groups, shards.groups, strict=True):
        numbers_here = list(range(start, start + len(group)))
        groups.append({**{k: v for k, v in live.items() if k != "params"}, "params": numbers_here})
        start += len(group)
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(engine: Engine, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> None:
    """Load a plain optimizer's state into this rank's shards.

    Args:
        engine: The engine.
        optimizer: An attached optimizer.
        full: What :func:`optimizer_state_dict`, or the optimizer in one process, returned.

    Raises:
        ValueError: If the state is of an optimizer with other param groups.
    """
    shards = engine.shards_of(optimizer)
    have = [len(group) for group in shards.groups]
    given = [len(group["params"]) for group in full["param_groups"]]
    if have != given:
        raise ValueError(
            f"the checkpoint's {type(shards.optimizer).__name__} has param groups of {given} parameters, this one of "
            f"{have}. HINT: build the same param groups as in the run that was saved, or load only the weights."
        )
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    local = 0
    for saved, members in zip(full["param_groups"], shards.groups, strict=True):
        numbers = []
        for number, (flat, index) in zip(saved["params"], members, strict=True):
            if flat.entry(index) is None:
                continue
            if number in full["state"]:
                values = full["state"][number]
                state[local] = {key: part_of_state(key, value, flat, index) for key, value in values.items()}
            numbers.append(local)
            local += 1
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": numbers})
    shards.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _kinds(shards: OptimizerShards, flat: Flat, index: int) -> dict[str, Any]:
    """What this rank knows of a slot's state: the dtype of what is sharded, the value of what is not."""
    entry = flat.entries[index]
    state = shards.optimizer.state.get(entry, {}) if entry is not None else {}
    return {
        key: value.dtype
        if isinstance(value, Tensor) and entry is not None and value.shape == entry.shape
        else _to_host(value)
        for key, value in state.items()
    }


def _collect(shards: OptimizerShards, flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
    """The os shard of one kind of state, laid out like the flat."""
    shard = torch.zeros(flat.master.numel(), dtype=dtype, device=flat.device)
    for slot, entry in zip(flat.slots, flat.entries, strict=True):
        value = shards.optimizer.state.get(entry, {}).get(key) if entry is not None else None
        if value is not None:
            shard[slot.shard] = value.to(flat.device)
    return shard


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    return [_to_host(item) for item in value] if isinstance(value, list) else value
