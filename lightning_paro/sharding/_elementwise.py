"""Whether an optimizer may work on flat shards: its update of an element must not depend on any other element."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ELEMENTWISE", "STATE_SCALARS", "check_elementwise", "moves_without_gradient"]

STATE_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""Optimizer state that is one number per parameter; of a parameter without dimensions it looks like any other."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
"""Classes known to be elementwise, themselves and not their subclasses."""

_MIXING = {
    "LBFGS": "builds a curvature estimate over all parameters",
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "factors the second moment into rows and columns",
    "Shampoo": "preconditions whole matrices",
    "ScalableShampoo": "preconditions whole matrices",
    "DistributedShampoo": "preconditions whole matrices",
    "GaLore": "projects whole matrices",
    "AdaNorm": "scales each tensor's gradient by norms",
    "SOAP": "preconditions whole matrices",
    "LAMB": "scales each tensor's update by its norm",
    "Lamb": "scales each tensor's update by its norm",
    "LARS": "scales each tensor's update by its norm",
    "SparseAdam": "works on sparse gradients",
}
_MIXING |= dict.fromkeys(
    ["Prodigy", *(f"DAdapt{name}" for name in ["SGD", "Adam", "Adan", "AdanIP", "AdaGrad", "Adagrad", "Lion"])],
    "estimates one learning rate from all parameters",
)
_SHAPE = (6, 4)
_CUT = 10  # inside a row, so that neither piece is a smaller matrix
_STEPS = 12  # some do not move in their first ones
_LR = 0.01  # the user's may be zero while a scheduler warms up
_GRADIENTS = ("small", "large", "steady")  # bounds on norms come in late; what adapts wants to see a direction
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest move; fused kernels may know only one dtype


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of an element depends on other elements.

    Known classes are decided by name. An unknown one is tried on copies: a tensor updated whole, and in two pieces by
    an optimizer each, as two ranks would, must end in the same values. The optimizer itself is not touched.

    Raises:
        ValueError: With the reason and what to use instead.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE or not any(group["params"] for group in optimizer.param_groups):
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
    failures: list[tuple[str, Exception]] = []
    ways = list(product(_ways_to_step(kind), _TOLERANCES.items(), _GRADIENTS))
    for with_closure, (dtype, tolerance), gradients in ways:
        what = "on a small tensor"
        try:
            with torch.random.fork_rng(devices=[]):
                moved = functools.partial(_moved, optimizer, with_closure=with_closure, dtype=dtype, kind=gradients)
                whole = moved(slice(None))
                pieces = [moved(cut) for cut in (slice(_CUT), slice(_CUT, None))]
                what = "with empty param groups, as on a rank whose shards hold none of their parameters,"
                moved(slice(0))
        except Exception as raised:
            failures.append((what, raised))
            continue
        largest = whole.abs().max()
        if not (torch.isfinite(largest) and largest > 0):
            raise ValueError(
                f"{kind.__name__} is not known to be elementwise, and trying it on a small tensor moved that by "
                f"{largest} in {_STEPS} steps, which tells nothing. {hint}"
            )
        if not ((torch.cat(pieces, dim=1) - whole).abs() <= tolerance * largest).all():
            raise ValueError(
                f"{kind.__name__} mixes elements across a tensor: one tensor updated whole and in two pieces differed "
                f"after {_STEPS} steps, so it cannot work on flat shards of a parameter. {hint}"
            )
    if len(failures) == len(ways):
        what, error = failures[0]
        raise ValueError(
            f"{kind.__name__} is not known to be elementwise, and trying it {what} failed with "
            f"{type(error).__name__}: {error}. {hint}"
        ) from error


def _ways_to_step(kind: type[torch.optim.Optimizer]) -> list[bool]:
    """Whether ``step`` may be called without a closure, with one, or both. Updates differ if it is passed on late."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None:
        return [False]
    return [True] if closure.default is closure.empty else [False, True]


def moves_without_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer changes parameters in a step in which they have no gradient, as Lookahead does.

    Known classes do not. An unknown one is tried on a copy; one that cannot be tried is taken for one that does not.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return False
    for with_closure, dtype in product(_ways_to_step(kind), _TOLERANCES):
        start, gradients = _trial(len(optimizer.param_groups), dtype, "small")
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
            twin = _twin(optimizer, start, slice(None))
            pieces = [piece for group in twin.param_groups for piece in group["params"]]
            _step(twin, pieces, gradients[1:], with_closure)  # 11: who looks back every few steps has something to do
            before = [piece.detach().clone() for piece in pieces]
            _step(twin, pieces, [None] * _STEPS, with_closure)
            return not all(map(torch.equal, pieces, before))
    return False


def _moved(
    optimizer: torch.optim.Optimizer, cut: slice, *, with_closure: bool, dtype: torch.dtype, kind: str
) -> Tensor:
    """How far a copy of ``optimizer``, made for the elements ``cut`` of a small tensor per group, moves those."""
    start, gradients = _trial(len(optimizer.param_groups), dtype, kind)
    start = start[:, cut]
    twin = _twin(optimizer, start, cut)
    pieces = [piece for group in twin.param_groups for piece in group["params"]]
    _step(twin, pieces, [gradient[:, cut] for gradient in gradients], with_closure)
    if not pieces:
        return start
    return torch.stack([piece.detach().reshape(-1).cpu() for piece in pieces]) - start


def _trial(groups: int, dtype: torch.dtype, kind: str) -> tuple[Tensor, list[Tensor]]:
    """Values of a small tensor per group, and gradients for some steps."""
    generator = torch.Generator().manual_seed(0)
    size = (groups, _SHAPE[0] * _SHAPE[1])
    start = torch.randn(size, generator=generator, dtype=dtype)
    random = torch.randn((_STEPS, *size), generator=generator, dtype=dtype)
    if kind == "steady":  # always the same direction, orthogonal to the values, shrinking
        along = (random[0] * start).sum(1, keepdim=True) / start.square().sum(1, keepdim=True)
        return start, [0.7**step * (random[0] - along * start) for step in range(_STEPS)]
    return start, list(random * (1e4 if kind == "large" else 1.0))


def _step(
    twin: torch.optim.Optimizer, pieces: list[nn.Parameter], gradients: Sequence[Tensor | None], with_closure: bool
) -> None:
    for gradient in gradients:
        closure = functools.partial(_give, gradient, pieces)
        closure()
        twin.step(closure) if with_closure else twin.step()


def _give(gradient: Tensor | None, pieces: list[nn.Parameter]) -> Any:
    for number, piece in enumerate(pieces):
        piece.grad = None if gradient is None else gradient[number].to(piece.device).reshape(piece.shape).clone()
    return torch.ones(())


def _twin(optimizer: torch.optim.Optimizer, start: Tensor, cut: slice) -> torch.optim.Optimizer:
    """An optimizer with the same options and as much state as the original, for one piece of ``start`` per group."""
    kind = type(optimizer)
    twin = kind.__new__(kind)
    twin.state, twin.param_groups = defaultdict(dict), []
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(optimizer): twin, id(optimizer.state): twin.state, id(optimizer.param_groups): twin.param_groups}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups") or (callable(value) and hasattr(kind, name)):
            continue  # methods that schedulers and others have wrapped act on the original
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        vars(twin)[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    for group, values in zip(optimizer.param_groups, start, strict=True):
        options = copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo)
        if isinstance(options.get("lr"), Tensor):
            options["lr"] = torch.full_like(options["lr"], _LR)
        elif options.get("lr") is not None:
            options["lr"] = _LR
        pieces: list[nn.Parameter] = []
        if values.numel():
            like = group["params"][0] if group["params"] else torch.empty(())
            shape = _SHAPE if values.numel() == _SHAPE[0] * _SHAPE[1] else (-1,)
            pieces.append(nn.Parameter(values.clone().view(shape).to(like.device)))
            for key, value in optimizer.state.get(like, {}).items():
                twin.state[pieces[0]][key] = _resampled(key, value, like, pieces[0], cut)
        twin.param_groups.append({**options, "params": pieces})
    return twin


def _resampled(key: str, value: Any, like: Tensor, piece: Tensor, cut: slice) -> Any:
    """State the optimizer has from the start, as Adagrad does, in the size of the piece."""
    if not isinstance(value, Tensor) or value.shape != like.shape or key in STATE_SCALARS or not value.numel():
        return copy.deepcopy(value)
    numbers = torch.arange(_SHAPE[0] * _SHAPE[1])[cut] % value.numel()
    sampled = value.detach().reshape(-1)[numbers.to(value.device)].view(piece.shape)
    return sampled.to(piece.device, piece.dtype if value.is_floating_point() else value.dtype)
