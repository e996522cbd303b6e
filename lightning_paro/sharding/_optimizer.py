"""The user's own optimizer, working on this rank's shards of the parameters it was built on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_paro.sharding._flat import Flat
from lightning_paro.topology import Granularity

if TYPE_CHECKING:
    from lightning_paro.sharding._engine import Engine

__all__ = ["OptimizerShards", "check_elementwise", "part_of_state", "swap"]

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
_MIXING = {
    "LBFGS": "builds a curvature estimate over all parameters",
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "factors the second moment into rows and columns",
    "Shampoo": "preconditions whole matrices",
    "SOAP": "preconditions whole matrices",
    "LAMB": "scales each tensor's update by its norm",
    "Lamb": "scales each tensor's update by its norm",
    "LARS": "scales each tensor's update by its norm",
    "SparseAdam": "works on sparse gradients",
}

Member = tuple[Flat, int]


class OptimizerShards:
    """An attached optimizer: which slots it owns, and what happens around its step.

    Attributes:
        optimizer: The user's optimizer; its param groups hold this rank's entries.
        groups: By param group, the slots it was given, in the user's order, empty ones included.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self.optimizer = optimizer
        self.groups: list[list[Member]] = []
        self._engine = engine
        self._skipped = False
        self._detach: list[Callable[[], None]] = []

    def entries(self) -> Iterator[nn.Parameter]:
        """The tensors the optimizer updates on this rank, empty slices left out."""
        for flat, index in self.members():
            entry = flat.entry(index)
            if entry is not None:
                yield entry

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
            shown = set(indices) & flat.used
            flat.clear(indices)
            if not set_to_none and shown:
                if flat.gradient is None:
                    size = flat.master.numel()
                    flat.gradient = torch.zeros(size, dtype=flat.master_dtype, device=flat.device)
                flat.expose(shown)

    def before_update(self) -> None:
        """Just before the optimizer reads its gradients: refuse what would be silently wrong."""
        engine = self._engine
        left = [flat.unit for flat in self.flats() if flat.is_open]
        if left:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() was called while accumulated gradients of unit '{left[0]}' "
                f"{f'and {len(left) - 1} more ' if len(left) > 1 else ''}have not been reduced over all ranks: the last "
                "backward ran with gradient synchronisation blocked. HINT: run the last backward of a window outside "
                "`toggle_model(sync_grad=False)` / `block_backward_sync()`, or call `optimizer.zero_grad()` first."
            )
        for flat, index in self.members():
            flat.check_untouched(index)
        self._skipped = False
        if engine.nonfinite != "propagate":
            gradients = [entry.grad for entry in self.entries() if entry.grad is not None]
            bad = bool(gradients) and not bool(torch.isfinite(torch.stack(torch._foreach_norm(gradients))).all())
            if engine.any_rank(bad):
                if engine.nonfinite == "raise":
                    raise RuntimeError(
                        "a gradient is not finite on at least one rank, and nonfinite='raise'. HINT: lower the learning "
                        "rate, clip gradients, or use nonfinite='skip' to leave such steps out."
                    )
                self._skipped = True
                for entry in self.entries():
                    entry.grad = None

    def after_update(self) -> None:
        """Just after the optimizer wrote its shards: the new values climb to rung p."""
        if not self._skipped:
            for flat in self.flats():
                flat.update()

    def add_group(self, group: dict[str, Any]) -> None:
        """Swap the parameters of a param group for entries, in place, and carry over state that exists already."""
        members = [self._engine.locate(parameter) for parameter in group["params"]]
        entries: list[nn.Parameter] = []
        for (flat, index), parameter in zip(members, list(group["params"]), strict=True):
            entry = flat.entry(index)
            state = self.optimizer.state.pop(parameter, None)
            if entry is None:
                continue
            entries.append(entry)
            if state:
                self.optimizer.state[entry] = {
                    key: part_of_state(key, value, flat, index) for key, value in state.items()
                }
        group["params"][:] = entries
        self.groups.append(members)

    def detach(self) -> None:
        """Let go of the optimizer: its hooks and wrappers are removed, its state stays."""
        for undo in self._detach:
            undo()
        self._detach.clear()


_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})  # of a parameter without dimensions these look like state


def part_of_state(key: str, value: Any, flat: Flat, index: int) -> Any:
    """This rank's part of a whole optimizer state value; what is not of the parameter's shape is kept as it is."""
    slot = flat.slots[index]
    if not isinstance(value, Tensor) or value.shape != slot.shape or key in _SCALARS:
        return value
    if flat.partition.os is Granularity.N:
        return value
    size = slot.shard.stop - slot.shard.start
    return value.reshape(-1)[slot.offset : slot.offset + size].clone()


def swap(optimizer: torch.optim.Optimizer, engine: Engine) -> OptimizerShards:
    """Put an optimizer on shards, see :meth:`Engine.attach`.

    Raises:
        ValueError: If the optimizer mixes elements across a tensor and the optimizer state is partitioned, or if it
            holds a tensor that is not a parameter of the module.
    """
    if engine.partition.os is not Granularity.N:
        check_elementwise(optimizer)
    shards = OptimizerShards(optimizer, engine)
    for group in optimizer.param_groups:
        shards.add_group(group)

    def before(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            shards.before_update()
            return args, kwargs

        @functools.wraps(closure)
        def wrapped() -> Any:
            result = closure()
            shards.before_update()
            return result

        return args[:1], {**kwargs, "closure": wrapped}

    def after(*_: Any) -> None:
        shards.after_update()

    original_add = optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        original_add(group)
        shards.add_group(optimizer.param_groups[-1])

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    optimizer.zero_grad = shards.zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    shards._detach += [handle.remove for handle in handles]
    shards._detach += [
        functools.partial(optimizer.__dict__.pop, name, None) for name in ("zero_grad", "add_param_group")
    ]
    return shards


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements of the same tensor.

    Known classes are decided by name. An unknown one is tried: a tensor updated whole and in two pieces must give the
    same values after three steps.

    Raises:
        ValueError: With the reason and what to use instead.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE:
        return
    hint = (
        "HINT: use an elementwise optimizer (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, RMSprop, Lion, ...), or keep the "
        "optimizer state whole with strategy='paro_nnn'."
    )
    for base in kind.__mro__:
        if base.__name__ in _MIXING:
            raise ValueError(
                f"{kind.__name__} {_MIXING[base.__name__]}, so it cannot work on flat shards of a parameter. {hint}"
            )
    try:
        equal = _splits(optimizer)
    except Exception as error:
        raise ValueError(
            f"{kind.__name__} is not known to be elementwise, and trying it on a small tensor failed with "
            f"{type(error).__name__}: {error}. {hint}"
        ) from error
    if not equal:
        raise ValueError(
            f"{kind.__name__} mixes elements across a tensor: one tensor updated whole and in two pieces differed after "
            f"three steps, so it cannot work on flat shards of a parameter. {hint}"
        )


def _splits(optimizer: torch.optim.Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    gradients = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)

    def trial(cuts: list[slice]) -> Tensor:
        flat, whole = values.reshape(-1), len(cuts) == 1
        pieces = [nn.Parameter(values.clone() if whole else flat[cut].clone()) for cut in cuts]
        twin = copy.copy(optimizer)
        twin.__dict__ = dict(optimizer.__dict__)
        twin.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        twin.param_groups = [{**copy.deepcopy(group), "params": pieces}]
        for gradient in gradients:
            for piece, cut in zip(pieces, cuts, strict=True):
                piece.grad = gradient.clone() if whole else gradient.reshape(-1)[cut].clone()
            twin.step()
        return torch.cat([piece.detach().reshape(-1) for piece in pieces])

    return torch.allclose(trial([slice(0, 24)]), trial([slice(0, 10), slice(10, 24)]), rtol=1e-9, atol=1e-12)
