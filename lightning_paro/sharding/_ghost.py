"""Tensors that are not there: what stands in for a released parameter, and for a gradient that lives in shards.

Both keep shape, dtype and identity, so model summaries, optimizers and ``named_parameters`` work; both raise an error
that says what to do as soon as somebody computes with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["gradient_ghost", "is_gradient_ghost", "nan_ghost", "pending_class", "released_class"]

_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_ipu is_leaf is_maia is_meta is_mkldnn is_mps is_mtia is_nested "
    "is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout names nbytes ndim output_nr "
    "requires_grad retains_grad shape _base _version _backward_hooks _post_accumulate_grad_hooks"
)
_METHODS = (
    "__hash__ __len__ _is_view dim element_size get_device is_complex is_conj is_contiguous is_floating_point "
    "is_inference is_neg nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size "
    "storage_offset stride"
)


def _allowed() -> frozenset[Any]:
    """What may be asked of a tensor whose values are elsewhere: everything that reads no value."""
    functions: set[Any] = set()
    for name in _PROPERTIES.split():
        descriptor = getattr(Tensor, name, None)
        functions.update(getattr(descriptor, method, None) for method in ("__get__", "__set__", "__delete__"))
    functions.update(getattr(Tensor, name, None) for name in _METHODS.split())
    functions.update({torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel})
    functions.update({torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like})
    return frozenset(functions - {None})


_ALLOWED = _allowed()


class _Released(nn.Parameter):
    """Mixed in front of a parameter's own class while its values are sharded."""

    _paro_where: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        culprit = next((a for a in _flatten((args, kwargs or {})) if isinstance(a, _Released)), None)
        raise _error(culprit, _spoken(func))

    def as_subclass(self, cls: Any) -> NoReturn:
        raise _error(self, "as_subclass")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype}, {self._paro_where})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _error(self, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _error(self, "pickle")


def _flatten(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _flatten(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _flatten(item)]
    return [tree]


def _spoken(function: Any) -> str:
    """The name a user wrote: ``data``, not the ``__get__`` of its descriptor."""
    name = getattr(function, "__name__", str(function))
    return str(function.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name)


def _error(parameter: _Released | None, what: str) -> RuntimeError:
    where = getattr(parameter, "_paro_where", "a parameter")
    return RuntimeError(
        f"{where} is released: its values are in shards on other ranks, so `{what}` cannot read or write them here. "
        "HINT: on all ranks, wrap the code in `with trainer.strategy.full_parameters(module):`; changes are kept with "
        "`writeback=True`. In a forward, make the module that uses it a unit, ParoStrategy(units={...}), or keep "
        "parameters whole with p=N, such as paro_nig. After a run that failed, fit again or load a checkpoint."
    )


class _Pending(nn.Parameter):
    """Mixed in front of a parameter's own class while its new values are under way."""

    _paro_settle: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ALLOWED:
            for argument in _flatten((args, kwargs or {})):
                if isinstance(argument, _Pending):
                    argument._paro_settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        self._paro_settle()
        return self.as_subclass(cls)

    def __deepcopy__(self, memo: Any) -> Any:
        self._paro_settle()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._paro_settle()
        return self.__reduce_ex__(protocol)


def released_class(parameter: nn.Parameter, where: str) -> type:
    """The class of ``parameter`` while it is released, which refuses to compute: assign it to ``__class__``.

    Args:
        parameter: The parameter, whole.
        where: Names it and its unit, for the error.
    """
    own = type(parameter)
    bases = (_Released,) if own is nn.Parameter else (_Released, own)
    return type(f"Released{own.__name__}", bases, {"_paro_where": where})


def pending_class(parameter: nn.Parameter, settle: Callable[[], None]) -> type:
    """The class of ``parameter`` while new values are under way: whoever reads or writes it waits for them first.

    Args:
        parameter: The parameter, whole.
        settle: Waits, and gives the parameter its own class back.
    """
    own = type(parameter)
    bases = (_Pending,) if own is nn.Parameter else (_Pending, own)
    return type(f"Pending{own.__name__}", bases, {"_paro_settle": staticmethod(settle)})


def nan_ghost(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` that takes the memory of one element, NaN: the second line behind the class."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


class _GradientGhost(Tensor):
    """Stands in ``parameter.grad`` while the gradient itself lies in the shards of all ranks."""

    _paro_name: str
    _paro_zero: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.zero_:
            args[0]._paro_zero()
            return args[0]
        if func in _ALLOWED or func in _GRADIENT_ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        culprit = next((a for a in _flatten((args, kwargs or {})) if isinstance(a, _GradientGhost)), None)
        name = getattr(culprit, "_paro_name", "a parameter")
        raise RuntimeError(
            f"the gradient of '{name}' lies in shards over the ranks, so `{_spoken(func)}` cannot "
            "use it. HINT: `trainer.strategy.grad_norm()` gives the gradient norm, Trainer(gradient_clip_val=...) or "
            "`self.clip_gradients(...)` clips, and `lightning_paro.state_access(trainer).trainable_shards()` hands out "
            "the shards."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gradient(sharded, shape={tuple(self.shape)}, dtype={self.dtype}, of '{self._paro_name}')"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


# What `zero_grad` of torch and Lightning does before it drops a gradient or makes it zero; what a compiler looks at.
_GRADIENT_ALLOWED = frozenset({Tensor.detach_, Tensor.requires_grad_, Tensor.untyped_storage})


def gradient_ghost(parameter: Tensor, name: str, zero: Callable[[], None]) -> Tensor:
    """A stand-in for the gradient of ``parameter``: not None, of its shape and dtype, refusing to compute.

    Args:
        parameter: The parameter.
        name: Its name.
        zero: What ``zero_`` does, which is all that can be done to it.
    """
    values = nan_ghost(parameter.shape, parameter.dtype, parameter.device)
    ghost: Tensor = values.as_subclass(_GradientGhost)
    ghost._paro_name = name  # type: ignore[attr-defined]
    ghost._paro_zero = zero  # type: ignore[attr-defined]
    return ghost


def is_gradient_ghost(gradient: Tensor) -> bool:
    """Whether a gradient is a stand-in made by :func:`gradient_ghost`."""
    return isinstance(gradient, _GradientGhost)
