"""The user's own optimizer, working on this rank's shards of the parameters it was built on."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_paro.sharding._elementwise import STATE_SCALARS, check_elementwise, moves_without_gradient
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._state_by_shard import StateByShard
from lightning_paro.sharding._values import parameter_of, take_over_all
from lightning_paro.topology import Granularity

if TYPE_CHECKING:
    from lightning_paro.sharding._engine import Engine

__all__ = ["OptimizerShards", "part_of_state", "swap"]

Member = tuple[Flat, int]


class OptimizerShards:
    """An attached optimizer: which slots it owns, and what happens around its step.

    Its param groups hold the module's parameters, as the user put them there, and this rank's entries only while the
    optimizer's own code works on them: in its step, but not in the closure of that.

    Attributes:
        optimizer: The user's optimizer.
        groups: By param group, the slots it was given, in the user's order, empty ones included.
        moving: The slots, by flat, that its current step may move: those that have gradients, or all if it is one that
            does not ask for them.
        is_on_entries: Whether the param groups hold the entries just now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self.optimizer = optimizer
        self.groups: list[list[Member]] = []
        self._engine = engine
        self.moving: dict[Flat, set[int]] = {}
        self.is_on_entries = False
        self._moves_all = moves_without_gradient(optimizer)
        self._steps = 0  # one inside the other: a subclass may call the step of its base
        self._detach: list[Callable[[], None]] = []

    def entries(self) -> Iterator[nn.Parameter]:
        """The tensors the optimizer updates on this rank, empty slices left out."""
        for flat, index in self.members():
            entry = flat.entry(index)
            if entry is not None:
                yield entry

    def gradients(self) -> list[Tensor]:
        """The gradients that those have."""
        removed = {(flat, index) for flat in self.flats() for index in flat.removed()}
        kept = (flat.entry(index) for flat, index in self.members() if (flat, index) not in removed)
        return [entry.grad for entry in kept if entry is not None and entry.grad is not None]

    def members(self) -> Iterator[Member]:
        """All slots of the optimizer, the same on all ranks."""
        for group in self.groups:
            yield from group

    def flats(self) -> list[Flat]:
        """The flats that hold at least one slot of the optimizer."""
        return list({id(flat): flat for flat, _ in self.members()}.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters, at g and at os."""
        by_flat: dict[int, tuple[Flat, list[int]]] = {}
        for flat, index in self.members():
            by_flat.setdefault(id(flat), (flat, []))[1].append(index)
        for flat, indices in by_flat.values():
            if set_to_none:
                flat.clear(indices)
            else:
                flat.drop_removed()
                flat.zero(indices)

    def before_update(self) -> None:
        """Just before the optimizer reads its gradients: refuse what would be silently wrong."""
        engine = self._engine
        left = list(dict.fromkeys(flat.unit for flat, index in self.members() if index in flat.open))
        if left:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() was called while accumulated gradients of unit '{left[0]}' "
                f"{f'and {len(left) - 1} more ' if len(left) > 1 else ''}have not been reduced over all ranks: the "
                "last backward ran with gradient synchronisation blocked. HINT: run the last backward of a window "
                "outside `toggle_model(sync_grad=False)` / `block_backward_sync()`, or call `optimizer.zero_grad()` "
                "first."
            )
        for flat, index in self.members():
            flat.check_untouched(index)
        engine.discard_ahead()
        take_over_all(self.flats())
        moving: dict[Flat, set[int]] = {}  # the same on all ranks
        for flat, index in self.members():
            if index in flat.used or self._moves_all:
                moving.setdefault(flat, set()).add(index)
        for flat in self.flats():
            flat.drop_removed()
        if engine.nonfinite != "propagate":
            gradients = [gradient for gradient in self.gradients() if gradient.numel()]
            largest = torch._foreach_norm(gradients, float("inf")) if gradients else ()
            bad = bool(largest) and not bool(torch.isfinite(torch.stack(largest)).all())
            if engine.any_rank(bad):
                if engine.nonfinite == "raise":
                    raise RuntimeError(
                        "a gradient is not finite on at least one rank, and nonfinite='raise'. HINT: lower the "
                        "learning rate, clip gradients, or use nonfinite='skip' to leave such steps out."
                    )
                moving.clear()
                for entry in self.entries():
                    entry.grad = None
        for flat, indices in moving.items():
            self.moving.setdefault(flat, set()).update(indices)

    def after_update(self) -> None:
        """Just after the optimizer wrote its shards: the new values climb to rung p."""
        self._engine.update(self.moving)

    def take(self, group: dict[str, Any]) -> None:
        """Own the parameters of a param group, and carry over state that exists already."""
        members = [self._engine.locate(parameter) for parameter in group["params"]]
        for (flat, index), parameter in zip(members, group["params"], strict=True):
            if parameter.requires_grad:
                flat.unfreeze()
            entry = flat.entry(index)
            state = dict.pop(self.optimizer.state, parameter, None)
            if entry is not None and state:
                parts = {key: part_of_state(key, value, flat, index) for key, value in state.items()}
                self.optimizer.state[entry] = {key: _on(entry.device, part) for key, part in parts.items()}
        self.groups.append(members)

    def follow(self) -> None:
        """Own what the param groups hold by now: a user may have changed them."""
        if self.is_on_entries:
            return
        held = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        if held != [[id(flat.slots[index].parameter) for flat, index in members] for members in self.groups]:
            self.groups.clear()
            for group in self.optimizer.param_groups:
                self.take(group)

    def guard_state(self) -> None:
        """Until :meth:`detach`, let the optimizer's state know the module's parameters."""
        state = vars(self.optimizer).get("state")
        if self._detach and type(state) is defaultdict:  # a new one after load_state_dict
            holders = vars(self.optimizer).values()
            if not any(getattr(holder, "state", None) is state for holder in holders):  # a wrapper shares it
                self.optimizer.state = StateByShard(state, self._engine)

    def step_begin(self) -> None:
        """The optimizer's own code begins to work."""
        self._steps += 1
        self._show_entries()

    def step_end(self) -> None:
        """The optimizer's own code is done."""
        self._steps = max(self._steps - 1, 0)
        if not self._steps:
            self._show_parameters()

    def abort(self) -> None:
        """A step was left by an exception."""
        self._steps = 0
        self._show_parameters()

    @contextmanager
    def on_parameters(self) -> Iterator[None]:
        """Inside the context, which is in a step, the param groups hold the module's parameters again."""
        self._show_parameters()
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self._show_entries()

    @contextmanager
    def on_entries(self) -> Iterator[None]:
        """Inside the context the param groups hold the entries, also after :meth:`detach`."""
        before = self.is_on_entries
        self._show_entries()
        try:
            yield
        finally:
            if not before:
                self._show_parameters()

    def detach(self) -> None:
        """Let go of the optimizer: no more hooks and wrappers.

        Its state stays with the entries, to be saved, or to be taken up by the next engine.
        """
        while self._detach:
            self._detach.pop()()
        self.abort()
        if type(self.optimizer.state) is StateByShard:
            self.optimizer.state = defaultdict(dict, self.optimizer.state)

    def _show_entries(self) -> None:
        if self.is_on_entries:
            return
        self.follow()
        self.guard_state()
        self.is_on_entries = True
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            entries = [flat.entry(index) for flat, index in members]
            group["params"][:] = [entry for entry in entries if entry is not None]

    def _show_parameters(self) -> None:
        if not self.is_on_entries:
            return
        self.is_on_entries = False
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"][:] = [flat.slots[index].parameter for flat, index in members]
        self.guard_state()


def part_of_state(key: str, value: Any, flat: Flat, index: int) -> Any:
    """This rank's part of a whole optimizer state value; what is not of the parameter's shape is kept as it is."""
    slot = flat.slots[index]
    if not isinstance(value, Tensor) or value.shape != slot.shape or key in STATE_SCALARS:
        return value
    if flat.partition.os is Granularity.N:
        return value
    size = slot.shard.stop - slot.shard.start
    return value.reshape(-1)[slot.offset : slot.offset + size].clone()


def _take_up(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Hand state that an earlier engine left with its entries over to the parameters, to be swapped with them."""
    layout = (engine.partition, engine.topology)
    before = getattr(optimizer, "_paro_layout", layout)
    if before != layout and engine.any_rank(bool(optimizer.state)):
        raise ValueError(
            f"{type(optimizer).__name__} holds state from a run with another partition or topology, {before[0]} on "
            f"{before[1]}; this one is {layout[0]} on {layout[1]}. HINT: build a new one in configure_optimizers, "
            "and load a checkpoint to go on with the old state."
        )
    optimizer._paro_layout = layout  # type: ignore[attr-defined]
    for entry in list(optimizer.state):
        parameter = parameter_of(entry)
        if parameter is not None:
            optimizer.state[parameter] = optimizer.state.pop(entry)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) and value.dim() else value


def swap(optimizer: torch.optim.Optimizer, engine: Engine) -> OptimizerShards:
    """Put an optimizer on shards, see :meth:`Engine.attach`.

    Raises:
        ValueError: If the optimizer mixes elements across a tensor and the optimizer state is partitioned, or if it
            holds a tensor that is not a parameter of the module.
    """
    if engine.partition.os is not Granularity.N:
        check_elementwise(optimizer)
    shards = OptimizerShards(optimizer, engine)
    _take_up(optimizer, engine)
    for group in optimizer.param_groups:
        shards.take(group)

    def before(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        shards.moving.clear()
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if not callable(closure):
            shards.before_update()
            shards.step_begin()
            return None
        calls = 0

        @functools.wraps(closure)
        def wrapped() -> Any:
            nonlocal calls
            if calls:  # the optimizer moved in between, and wants the loss where it is now
                shards.after_update()
            calls += 1
            with shards.on_parameters():
                result = closure()
                shards.before_update()
            return result

        shards.step_begin()
        return ((args[0], wrapped, *args[2:]), kwargs) if is_positional else (args, {**kwargs, "closure": wrapped})

    def after(*_: Any) -> None:
        shards.step_end()
        shards.after_update()
        if shards.is_on_entries:  # a subclass called this step, and may write on
            engine.settle()

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)  # type: ignore[attr-defined]
    shards._detach += [handle.remove for handle in handles]
    methods = {"zero_grad": shards.zero_grad, "add_param_group": _adding(shards)}
    methods |= {name: _on_whole_state(shards, name) for name in ("state_dict", "load_state_dict")}
    for name, method in methods.items():
        shards._detach.append(functools.partial(_restore, optimizer, name, vars(optimizer).get(name)))
        setattr(optimizer, name, method)
    shards.guard_state()
    return shards


def _adding(shards: OptimizerShards) -> Callable[..., None]:
    optimizer, original = shards.optimizer, shards.optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        original(group)
        try:
            shards.take(optimizer.param_groups[-1])
        except ValueError:
            del optimizer.param_groups[-1]
            raise

    return add_param_group


def _on_whole_state(shards: OptimizerShards, name: str) -> Callable[..., Any]:
    """``state_dict`` or ``load_state_dict``, where an optimizer has its whole state, or while it works on entries."""
    original = getattr(shards.optimizer, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if not shards.is_on_entries and shards._engine.partition.os is not Granularity.N:
            raise RuntimeError(
                f"{type(shards.optimizer).__name__}.{name}() was called, but this rank holds only shards of the "
                "optimizer's state. HINT: call `trainer.save_checkpoint(...)` on all ranks and load it with "
                "`ckpt_path=...`; `trainer.strategy.optimizer_state(optimizer)`, on all ranks, gives rank 0 the whole."
            )
        with shards.on_entries():
            return original(*args, **kwargs)

    return method


def _restore(thing: object, name: str, value: Any) -> None:
    """Put an attribute of an instance back; None means that it had only its class's."""
    vars(thing).pop(name, None)
    if value is not None:
        setattr(thing, name, value)
