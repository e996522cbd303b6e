"""An optimizer on shards, saved as the plain optimizer it would be in one process, and loaded from such a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_paro.sharding._consensus import agree
from lightning_paro.sharding._elementwise import ELEMENTWISE, STATE_SCALARS
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
    engine.meet("reading the whole state of an optimizer")
    here = engine.groups.rank == 0
    state = _own(shards) if engine.partition.os is Granularity.N else _gathered(engine, shards, here)
    if not here:
        return {}
    state |= {key: _to_host(value) for key, value in shards.optimizer.state.items() if not isinstance(key, Tensor)}
    groups, start = [], 0
    for live, group in zip(shards.optimizer.param_groups, shards.groups, strict=True):
        numbers = list(range(start, start + len(group)))
        groups.append({**_to_host({k: v for k, v in live.items() if k != "params"}), "params": numbers})
        start += len(group)
    with shards.on_entries():  # whatever else the optimizer's own state dict has
        return {**shards.optimizer.state_dict(), "state": state, "param_groups": groups}


def load_optimizer_state_dict(engine: Engine, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> None:
    """Load a plain optimizer's state into this rank's shards.

    Args:
        engine: The engine.
        optimizer: An attached optimizer.
        full: What :func:`optimizer_state_dict`, or the optimizer in one process, returned.

    Raises:
        ValueError: If the state is of an optimizer with other param groups, or of other parameters.
    """
    shards = engine.shards_of(optimizer)
    shards.follow()
    have = [len(group) for group in shards.groups]
    given = [len(group["params"]) for group in full["param_groups"]]
    if have != given:
        raise ValueError(
            f"the checkpoint's {type(shards.optimizer).__name__} has param groups of {given} parameters, this one of "
            f"{have}. HINT: build the same param groups as in the run that was saved, or load only the weights."
        )
    state: dict[Any, Any] = {key: value for key, value in full["state"].items() if not isinstance(key, int)}
    groups: list[dict[str, Any]] = []
    local = 0
    for saved, members in zip(full["param_groups"], shards.groups, strict=True):
        numbers = []
        for number, (flat, index) in zip(saved["params"], members, strict=True):
            values = full["state"].get(number)
            _check_shapes(shards, flat, index, values or {})  # on all ranks, whether they hold a part or not
            if flat.entry(index) is None:
                continue
            if values is not None:
                state[local] = {key: part_of_state(key, value, flat, index) for key, value in values.items()}
            numbers.append(local)
            local += 1
        groups.append({**{k: v for k, v in saved.items() if k != "params"}, "params": numbers})
    with shards.on_entries():
        shards.optimizer.load_state_dict({**full, "state": state, "param_groups": groups})


def _own(shards: OptimizerShards) -> dict[Any, Any]:
    """The state of an optimizer whose entries are whole parameters."""
    state = {}
    for number, (flat, index) in enumerate(shards.members()):
        entry = flat.entries[index]
        if entry is not None and entry in shards.optimizer.state:
            state[number] = _to_host(shards.optimizer.state[entry])
    return state


class _Kind(NamedTuple):
    """What a rank knows of one value in the state of one entry."""

    dtype: torch.dtype | None  # of a tensor of the entry's shape, which is sharded like the entry
    value: Any  # of anything else, and of a tensor of one element, which could be either


def _gathered(engine: Engine, shards: OptimizerShards, here: bool) -> dict[Any, Any]:
    """The state of an optimizer whose entries are slices, put together where ``here`` is set. Collective."""
    members = list(shards.members())
    by_rank = agree(engine.groups, "saving the optimizer", lambda: [_kinds(shards, *member) for member in members])
    plain = {key for kinds in by_rank for slot in kinds for key, kind in slot.items() if kind.dtype is None}
    by_slot = zip(*by_rank, strict=True)
    merged = [_merge(shards, *member, kinds, plain) for member, kinds in zip(members, by_slot, strict=True)]
    state: dict[Any, Any] = {number: dict(kinds) for number, kinds in enumerate(merged) if kinds}
    for flat in shards.flats():
        numbers = {index: number for number, (owner, index) in enumerate(members) if owner is flat}
        pairs = [pair for n in numbers.values() for pair in merged[n].items() if isinstance(pair[1], torch.dtype)]
        for key, dtype in dict.fromkeys(pairs):
            whole = flat.expand(_collect(shards, flat, key, dtype))
            for index, number in numbers.items():
                if here and merged[number].get(key) is dtype:
                    slot = flat.slots[index]
                    part = whole[slot.start : slot.start + slot.numel]
                    state[number][key] = part.to("cpu", copy=True).view(slot.shape)
    return state


def _kinds(shards: OptimizerShards, flat: Flat, index: int) -> dict[str, _Kind]:
    """What this rank knows of a slot's state."""
    entry = flat.entries[index]
    if entry is None:
        return {}
    kinds = {}
    for key, value in shards.optimizer.state.get(entry, {}).items():
        is_sharded = isinstance(value, Tensor) and value.shape == entry.shape
        inside = [] if isinstance(value, Tensor) else tree_leaves(value)
        if any(isinstance(leaf, Tensor) and leaf.shape == entry.shape for leaf in inside):
            raise ValueError(
                f"{type(shards.optimizer).__name__} keeps tensors of its parameters' shape inside a "
                f"{type(value).__name__}, as '{key}' of '{flat.slots[index].name}': they are sharded and cannot be "
                "saved from there. HINT: keep them under keys of their own in `optimizer.state[parameter]`."
            )
        is_told = not is_sharded or value.numel() == 1
        kinds[key] = _Kind(value.dtype if is_sharded else None, _to_host(value) if is_told else None)
    return kinds


def _merge(
    shards: OptimizerShards, flat: Flat, index: int, kinds: tuple[dict[str, _Kind], ...], plain: set[str]
) -> dict[str, Any]:
    """What all ranks together know of a slot's state: the dtype of what is sharded, the value of what is not.

    A value is not sharded if its key is ``plain`` anywhere: a vector may have the length of a slice by chance.
    """
    merged: dict[str, Any] = {}
    for key in next((kind for kind in kinds if kind), {}):
        found = [kind[key] for kind in kinds if key in kind]
        told = [kind.value for kind in found if kind.dtype is None or kind.value is not None]
        if key in plain and not (len(told) == len(found) and all(_same(told[0], value) for value in told)):
            raise ValueError(
                f"'{key}' of '{flat.slots[index].name}' in the state of {type(shards.optimizer).__name__} is neither "
                "of the parameter's shape nor the same on all ranks that hold a part of the parameter, so it cannot be "
                "saved whole. HINT: keep state per element, or per parameter and independent of the elements."
            )
        merged[key] = found[0].value if key in plain else found[0].dtype
    return merged


def _same(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(map(_equal, ones, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and bool(((one == other) | (one != one)).all())
    return bool(one == other or one != one)


def _collect(shards: OptimizerShards, flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
    """The os shard of one kind of state, laid out like the flat."""
    shard = torch.zeros(flat.master.numel(), dtype=dtype, device=flat.device)
    for slot, entry in zip(flat.slots, flat.entries, strict=True):
        value = shards.optimizer.state.get(entry, {}).get(key) if entry is not None else None
        if isinstance(value, Tensor) and value.dtype is dtype and entry is not None and value.shape == entry.shape:
            shard[slot.shard] = value.to(flat.device)
    return shard


def _check_shapes(shards: OptimizerShards, flat: Flat, index: int, values: Mapping[str, Any]) -> None:
    """Refuse state of another architecture, where it is known what shape it must have."""
    slot = flat.slots[index]
    for key, value in values.items():
        if type(shards.optimizer) not in ELEMENTWISE or key in STATE_SCALARS or not isinstance(value, Tensor):
            continue
        if value.shape != slot.shape:
            raise ValueError(
                f"the checkpoint's {type(shards.optimizer).__name__} has '{key}' of shape {tuple(value.shape)} for "
                f"parameter '{slot.name}', whose shape is {tuple(slot.shape)}. HINT: build the model with the "
                "configuration it was trained with, or load only the weights."
            )


def _to_host(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)
