"""A unit in motion: gathered just before its module computes, released just after, in forward and in backward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_paro.sharding._flat import Flat

__all__ = ["Unit"]


class Unit:
    """The flats of one module, and who needs them whole right now.

    A unit stays whole while somebody *holds* it (a step, an evaluation loop, ``full_parameters``), while its forward
    runs, and from the arrival of its outputs' gradients until both the gradients of its inputs and all its parameter
    gradients are there. Whatever cannot be told apart is released at the end of backward.

    Args:
        index: Position in the engine's list.
        name: Name of the module.
        module: The module whose forward needs the unit; None for the rest.
        flats: Its flat buffers.
        on_gather: Called with the unit before each gather; all ranks must gather in the same order.
    """

    def __init__(
        self, index: int, name: str, module: nn.Module | None, flats: list[Flat], on_gather: Callable[[Unit], None]
    ) -> None:
        self.index = index
        self.name = name
        self.flats = flats
        self.holds = 0
        self._on_gather = on_gather
        self._depth = 0
        self._call = object()
        self._running: set[object] = set()
        self._handles: list[Any] = []
        if module is not None and any(flat.partition.p for flat in flats):
            self._install(module)

    @property
    def is_whole(self) -> bool:
        """Whether the whole values are there."""
        return all(flat.is_whole for flat in self.flats)

    def gather(self) -> None:
        """Make the whole values available; nothing to do if they are."""
        if not self.is_whole:
            self._on_gather(self)
            for flat in self.flats:
                flat.gather()

    def hold(self) -> None:
        """Gather, and stay whole until :meth:`let_go`."""
        self.holds += 1
        self.gather()

    def let_go(self) -> None:
        """End one :meth:`hold`."""
        self.holds -= 1
        self._release_if_idle()

    def settle(self) -> None:
        """End of backward, or start of a step: no call is running any more, whatever was interrupted."""
        self._depth = 0
        self._running.clear()
        self._release_if_idle()

    def gradient_arrived(self) -> None:
        """All gradients of one flat are there; perhaps nobody needs the values any more."""
        self._end_of_call(None)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _release_if_idle(self) -> None:
        if self.holds == 0 and self._depth == 0 and not self._running:
            for flat in self.flats:
                flat.release()

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _install(self, module: nn.Module) -> None:
        unit = weakref.proxy(self)  # a hook that owns its unit is a cycle through the module

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            unit._before_forward(args, kwargs)

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            unit._after_forward(output)

        self._handles = [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _before_forward(self, args: Any, kwargs: Any) -> None:
        self.gather()
        if not _in_backward():
            self._depth += 1
            if self._depth > 1:
                return
        self._call = object()
        if torch.is_grad_enabled():
            inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
            if inputs:  # hooked before the forward runs, which may change its inputs in place
                end = _weakly(self._end_of_call, self._call)
                torch.autograd.graph.register_multi_grad_hook(inputs, end, mode="all")

    def _after_forward(self, output: Any) -> None:
        if torch.is_grad_enabled():
            start = _weakly(self._start_of_call, self._call)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(start)
        if not _in_backward():  # in a recomputation the values are needed on
            self._depth = max(self._depth - 1, 0)
            self._release_if_idle()

    def _start_of_call(self, call: object) -> None:
        self._running.add(call)
        self.gather()

    def _end_of_call(self, call: object | None) -> None:
        self._running.discard(call)
        if not self._running and not any(flat.pending > 0 for flat in self.flats):
            self._release_if_idle()


def _weakly(method: Callable[[Any], None], argument: object) -> Callable[[Any], None]:
    """A gradient hook that calls ``method(argument)`` if its unit is still there: graphs may outlive an engine."""
    reference = weakref.WeakMethod(method)

    def hook(_: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(argument)

    return hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
