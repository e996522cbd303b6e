"""What one micro-batch costs a rank by itself, seconds and activations, measured on a copy of the module."""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

__all__ = ["Measured", "measure"]

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")

REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """One forward and backward without communication, without an optimizer and without kept gradients.

    Attributes:
        seconds: Median of three.
        activations: Bytes, at their peak. On CUDA whatever the allocator hands out beside parameters, workspaces
            included; elsewhere the tensors that autograd keeps for backward.
    """

    seconds: float
    activations: int


def measure(
    module: M,
    inputs: Callable[[], B],
    loss: Callable[[M, B], Tensor],
    *,
    device: torch.device | str = "cpu",
    compute_dtype: Callable[[torch.dtype], torch.dtype] = lambda own: own,
    units: Mapping[str, Sequence[nn.Parameter]] | None = None,
) -> Measured:
    """Run a copy of a module forward and backward: once to warm up, once to count bytes, three times to take the time.

    The module itself is left alone, and so is what it refers to and does not own; random generators are the caller's.

    Args:
        module: What is measured.
        inputs: Makes the inputs of one run, anew for each; not timed.
        loss: From the copy and the inputs to a scalar.
        device: Where the copy computes.
        compute_dtype: From a parameter's own dtype to the one it computes in.
        units: Names of submodules with the parameters that are on the device only while that submodule computes, the
            time of moving them not counted, for a module that does not fit as a whole. They may lie inside each other.
    """
    device = torch.device(device)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    twin = _Twin(module, device, compute_dtype, units or {})

    def run(meter: _Meter | None = None) -> float:
        batch = inputs()
        with twin.measured_by(meter):
            start = _now(device)
            loss(twin.module, batch).backward()
            return _seconds(start, _now(device)) - twin.seconds_moved()

    try:
        run()
        meter: _Meter = _Allocated(device) if device.type == "cuda" else _Saved(twin.module)
        run(meter)
        return Measured(statistics.median(run() for _ in range(REPEATS)), meter.peak)
    finally:
        twin.free()
        for parameter, gradient in gradients:
            parameter.grad = gradient  # a closure over the module itself, in place of a forward, is not copied


class _Meter(Protocol):
    """Counts activations while it is entered."""

    peak: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def without(self) -> AbstractContextManager[None]:
        """Inside, parameters come and go, which are no activations."""


class _Twin(Generic[M]):
    """A copy of a module whose gradients are dropped as soon as they are there."""

    def __init__(
        self,
        module: M,
        device: torch.device,
        compute_dtype: Callable[[torch.dtype], torch.dtype],
        units: Mapping[str, Sequence[nn.Parameter]],
    ) -> None:
        self._device = device
        moved = {id(parameter) for parameters in units.values() for parameter in parameters}
        memo: dict[int, Any] = {
            id(value): value
            for child in module.modules()
            for value in vars(child).values()
            if isinstance(value, (Dataset, DataLoader))  # a model may hold data, which need not be copied
        }
        for parameter in module.parameters():
            value = torch.empty_like(parameter, dtype=compute_dtype(parameter.dtype), device=device)
            if id(parameter) in moved:
                value.untyped_storage().resize_(0)
            else:
                value.copy_(parameter.detach())
            memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            vars(memo[id(parameter)]).update(vars(parameter))
            if parameter.requires_grad:
                memo[id(parameter)].register_post_accumulate_grad_hook(_drop_gradient)
        self._parameters: list[nn.Parameter] = [memo[id(parameter)] for parameter in module.parameters()]
        self.module: M = copy.deepcopy(module, memo)

        self._here: list[_Unit] = []
        self._moves: list[tuple[Any, Any]] = []
        self._meter: _Meter | None = None
        for name, parameters in units.items():
            unit = _Unit(name, [(parameter.detach(), memo[id(parameter)]) for parameter in parameters])
            child = self.module.get_submodule(name)
            child.register_forward_pre_hook(partial(self._before_forward, unit))
            child.register_forward_hook(partial(self._after_forward, unit))

    @contextmanager
    def measured_by(self, meter: _Meter | None) -> Iterator[None]:
        """One run, from the state in which units are away."""
        self._let_go(list(self._here))
        self._moves.clear()
        self._meter = meter
        with nullcontext() if meter is None else meter:
            yield
        self._meter = None

    def seconds_moved(self) -> float:
        """Seconds of the present run in which parameters were moved."""
        return sum(_seconds(start, stop) for start, stop in self._moves)

    def free(self) -> None:
        """Give the memory back now; hooks refer to each other, and the collector may take its time."""
        for parameter in self._parameters:
            parameter.grad = None
            parameter.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # communicators take theirs beside the allocator

    def _before_forward(self, unit: _Unit, *_: object) -> None:
        self._fetch(unit)

    def _after_forward(self, unit: _Unit, _module: nn.Module, _inputs: object, output: object) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))

    def _before_backward(self, unit: _Unit, _gradient: Tensor) -> None:
        self._fetch(unit)

    def _fetch(self, unit: _Unit) -> None:
        """Bring a unit and let the others go, except those around it, which will go on after it."""
        if unit in self._here:
            return
        start = _now(self._device)
        with nullcontext() if self._meter is None else self._meter.without():
            self._let_go([other for other in self._here if not unit.name.startswith(f"{other.name}.")])
            unit.fetch()
        self._here.append(unit)
        self._moves.append((start, _now(self._device)))

    def _let_go(self, units: Sequence[_Unit]) -> None:
        for unit in units:
            unit.let_go()
            self._here.remove(unit)


class _Unit:
    """Parameters that come and go in one storage, so that what autograd saved of them is valid when they are back."""

    def __init__(self, name: str, pairs: list[tuple[Tensor, nn.Parameter]]) -> None:
        self.name = name
        self._pairs = pairs

    def fetch(self) -> None:
        for source, parameter in self._pairs:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            parameter.data.copy_(source)

    def let_go(self) -> None:
        for _, parameter in self._pairs:
            parameter.untyped_storage().resize_(0)


class _Allocated:
    """On CUDA: the most that the allocator had handed out, beyond what there was before."""

    def __init__(self, device: torch.device) -> None:
        self.peak = 0
        self._device = device

    def __enter__(self) -> None:
        self._base = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *exception: object) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - self._base)

    @contextmanager
    def without(self) -> Iterator[None]:
        self.__exit__()
        before = torch.cuda.memory_allocated(self._device)
        yield
        self._base += torch.cuda.memory_allocated(self._device) - before
        torch.cuda.reset_peak_memory_stats(self._device)


class _Saved:
    """Elsewhere: what autograd keeps for backward, each storage once, and not the module's own."""

    def __init__(self, module: nn.Module) -> None:
        self.peak = 0
        self._now = 0
        self._times: Counter[int] = Counter()  # a storage is kept
        own = (tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.layout is torch.strided)
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(partial(_Kept, self), lambda kept: kept.tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def without(self) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(self, tensor: Tensor, times: int) -> None:
        """A tensor's storage is kept once more, or once less."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._own:
            return
        before, self._times[key] = self._times[key], self._times[key] + times
        self._now += storage.nbytes() * ((self._times[key] > 0) - (before > 0))
        self.peak = max(self.peak, self._now)


class _Kept:
    """A tensor that autograd keeps, until it lets it go."""

    def __init__(self, meter: _Saved, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would keep its graph, and that this
        self._meter = meter
        meter.keep(self.tensor, 1)

    def __del__(self) -> None:
        self._meter.keep(self.tensor, -1)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _now(device: torch.device) -> Any:
    """A point in time on the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(start: Any, stop: Any) -> float:
    if isinstance(start, float):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
