"""A unit in motion: gathered just before its module computes, released just after, in forward and in backward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_paro.sharding._flat import Flat

__all__ = ["Unit"]


class Unit:
    """The flats of one module, and who needs them whole right now.

    A unit stays whole while somebody *holds* it (a step, an evaluation loop, ``full_parameters``), while its forward
    runs, and from the arrival of its outputs' gradients until backward has left it behind, see :class:`Backward`. It is
    *kept* whole until the end of the step if its values are needed later still: for the gradient of a gradient, or
    because an output shows them.

    Args:
        index: Position in the engine's list.
        name: Name of the module.
        module: The module whose forward needs the unit; None for the rest.
        flats: Its flat buffers.
        on_forward: Called when a forward of its module begins.
        on_need: Called with the unit when its whole values are needed; makes it whole.
        on_reach: Called with the unit when the gradients of its outputs are there, before it is needed for them.
        keeps: Says of an idle unit that it stays whole nevertheless.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module | None,
        flats: list[Flat],
        on_forward: Callable[[], None],
        on_need: Callable[[Unit], None],
        on_reach: Callable[[Unit], None],
        keeps: Callable[[Unit], bool],
    ) -> None:
        self.index = index
        self.name = name
        self.flats = flats
        self.holds = 0
        self.is_kept = False
        self.nbytes_whole = sum(flat.nbytes_whole for flat in flats)
        self._on_forward = on_forward
        self._on_need = on_need
        self._on_reach = on_reach
        self._keeps = keeps
        self._depth = 0
        self._is_reached = False
        self._inputs: list[tuple[Tensor, int]] = []
        self._handles: list[Any] = []
        self._parts: list[_Attributes] = []
        if module is not None and any(flat.partition.p for flat in flats):
            self._install(module)
        elif module is not None:
            self._install_settling(module)

    @property
    def is_whole(self) -> bool:
        """Whether the whole values are there."""
        return all(flat.is_whole for flat in self.flats)

    @property
    def is_arriving(self) -> bool:
        """Whether they are under way."""
        return any(flat.arrival is not None for flat in self.flats)

    def arrive(self) -> None:
        """Use the whole values, which are under way, from here on."""
        for flat in self.flats:
            flat.arrive_whole()

    def hold(self) -> None:
        """Gather, and stay whole until :meth:`let_go`."""
        self.holds += 1
        self._on_need(self)

    def let_go(self) -> None:
        """End one :meth:`hold`."""
        self.holds -= 1
        self.release_if_idle()

    def is_inside(self, other: Unit) -> bool:
        """Whether the module of ``other`` contains this one's."""
        return self.name.startswith(f"{other.name}.")

    def leave(self) -> None:
        """Backward is done with the calls it has reached."""
        self._is_reached = False
        self.release_if_idle()

    def settle(self, another_follows: bool = False) -> None:
        """End of backward, or start of a step: no call is running any more, whatever was interrupted.

        Args:
            another_follows: Whether another backward of the same graphs may come, for which it is kept.
        """
        self._depth = 0
        self._inputs = []
        self._is_reached = False
        self.is_kept &= another_follows
        if not (self.holds or self.is_kept):
            self._release()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def release_if_idle(self) -> None:
        """Release unless somebody needs the values, or is just about to."""
        if not (self.holds or self._depth or self._is_reached or self.is_kept or self._keeps(self)):
            self._release()

    def _release(self) -> None:
        for flat in self.flats:
            flat.release()

    # ---- hooks ----------------------------------------------------------------------------------------------

    def _install(self, module: nn.Module) -> None:
        self._parts = [_Attributes(part) for part in module.modules()]
        before, after = _Hook(module, self._before_forward), _Hook(module, self._after_forward)
        self._handles = [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _install_settling(self, module: nn.Module) -> None:
        """Where parameters are whole all the time (p=N), a forward waits for their new values only."""
        self._handles = [module.register_forward_pre_hook(_Hook(module, self._settle_values), prepend=True)]

    def _settle_values(self, _: Any) -> None:
        self._on_forward()
        for flat in self.flats:
            flat.settle()

    def _before_forward(self, *inputs: Any) -> None:
        self._on_need(self)
        if _in_backward():
            return
        self._on_forward()
        self._depth += 1
        if torch.is_grad_enabled():
            self._inputs = [(tensor, tensor._version) for tensor in _tensors(inputs) if tensor.requires_grad]

    def _after_forward(self, _: Any, output: Any) -> None:
        tensors = list(_tensors(output))
        inputs, self._inputs = self._inputs, []
        if torch.is_grad_enabled():
            unchanged = [tensor for tensor, version in inputs if tensor._version == version]
            handed_on = {id(tensor) for tensor in _with_bases(unchanged)}  # another's output
            reach = _weakly(self._reach)
            for tensor in _with_bases(tensors):
                if tensor.grad_fn is not None and id(tensor) not in handed_on:
                    tensor.register_hook(reach)
            for tensor in self._left_on_modules():
                tensor.register_hook(reach)
        if not _in_backward():  # in a recomputation the values are needed on
            self._depth = max(self._depth - 1, 0)
            if any(flat.is_shown_by(tensor) for flat in self.flats for tensor in tensors):
                self.is_kept = True
            self.release_if_idle()

    def _left_on_modules(self) -> Iterator[Tensor]:
        """What the forward left as an attribute, for an auxiliary loss or for a later call."""
        for part in self._parts:
            for value in part.tensors():
                if value.grad_fn is not None and not hasattr(value, "_paro_reaches"):
                    value._paro_reaches = True  # type: ignore[attr-defined]
                    yield value

    def _reach(self) -> None:
        self._on_reach(self)
        self._is_reached = True
        if torch.is_grad_enabled():  # create_graph=True: a later backward goes through these values again
            self.is_kept = True
        self._on_need(self)


class _Hook:
    """Calls a method of a unit when its module runs; owns neither, or it would be a cycle through the module.

    A copy of the module, or one that was pickled, has the hook as well, but is not the unit's: there it does nothing.
    """

    def __init__(self, module: nn.Module | None = None, method: Callable[..., None] | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._method = None if method is None else weakref.WeakMethod(method)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._module is not None and self._method is not None and module is self._module():
            method = self._method()
            if method is not None:
                method(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Attributes:
    """The attributes of a module that are its own, looked through after every forward, so without detours."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._names: list[str] = []
        self._known = -1

    def tensors(self) -> Iterator[Tensor]:
        module = self._module()
        if module is None:
            return
        attributes = vars(module)
        if len(attributes) != self._known:
            self._known = len(attributes)
            self._names = [n for n in attributes if n not in _OF_EVERY_MODULE]
        for name in self._names:
            value = attributes.get(name)
            if isinstance(value, Tensor):
                yield value


def _with_bases(tensors: list[Tensor]) -> Iterator[Tensor]:
    """And what views are of: a write to a view in place takes the hooks of the view out of the graph."""
    for tensor in tensors:
        yield tensor
        if tensor._is_view() and tensor._base is not None:
            yield tensor._base


def _weakly(method: Callable[[], None]) -> Callable[[Any], None]:
    """A gradient hook that calls ``method`` if its unit is still there: graphs may outlive an engine."""
    reference = weakref.WeakMethod(method)

    def hook(_: Any) -> None:
        bound = reference()
        if bound is not None:
            bound()

    return hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif tree is None or isinstance(tree, (bool, int, float, str)):
        return
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))
    else:
        for leaf in tree_leaves(tree):  # another kind of container, or an object of the user's own
            if isinstance(leaf, Tensor):
                yield leaf
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
                yield from (value for value in tree_leaves(vars(leaf)) if isinstance(value, Tensor))
