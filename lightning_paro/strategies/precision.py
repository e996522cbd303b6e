"""Precision, decided in one place: Lightning's plugin on one side, the engine's dtypes on the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_paro.planner._cost import fitting_dtype
from lightning_paro.sharding import PrecisionPolicy

if TYPE_CHECKING:
    from lightning_paro.sharding import Engine

__all__ = ["adopt", "policy_for"]

_SUPPORTED = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed")


class _Sharded(Precision):
    """What the sharded precision plugins share: the end of a backward, and clipping by the norm of all shards."""

    engine: Engine | None = None

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """End the engine's backward before ``on_after_backward``, where users look at gradients."""
        assert self.engine is not None
        self.engine.backward_end()
        return super().post_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients of ``optimizer`` so that their norm over all ranks is at most ``clip_val``."""
        assert self.engine is not None
        norm = self.engine.grad_norm(optimizer)
        gradients = self.engine.shards_of(optimizer).gradients()
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype is dtype], scale.to(dtype))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp the gradients of ``optimizer``; torch's function refuses a rank that holds none."""
        assert self.engine is not None
        entries = [entry for entry in self.engine.shards_of(optimizer).entries() if entry.grad is not None]
        if entries:
            torch.nn.utils.clip_grad_value_(entries, clip_val)


class _Full(_Sharded):
    pass


class _Double(_Sharded, DoublePrecision):
    pass


class _Half(_Sharded, HalfPrecision):
    pass


class _Mixed(_Sharded, MixedPrecision):
    """Lightning files a plugin's state under the name of its class: here that of its own, as other strategies do."""

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip. Lightning refuses fused optimizers, which unscale in their step; without a scaler nothing is scaled."""
        if self.scaler is None:
            Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)
        else:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if type(self).__qualname__ in checkpoint:
            checkpoint[MixedPrecision.__qualname__] = checkpoint.pop(type(self).__qualname__)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if MixedPrecision.__qualname__ in checkpoint:
            checkpoint[type(self).__qualname__] = checkpoint[MixedPrecision.__qualname__]


class _Scaler(GradScaler):
    """A gradient scaler whose non-finite flag is that of any rank, so that all ranks step or none does."""

    plugin: _Sharded

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        engine = self.plugin.engine
        assert engine is not None
        with engine.shards_of(optimizer).on_entries():
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flag = next(iter(flags.values())) if flags else torch.zeros_like(found_inf)
        if engine.topology.world_size > 1:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return {flag.device: flag}


def adopt(plugin: Precision) -> _Sharded:
    """The sharded counterpart of one of Lightning's precision plugins.

    Raises:
        ValueError: If the precision is not in the table of docs/paro.md, by name.
    """
    if isinstance(plugin, _Sharded):
        return plugin
    name = getattr(plugin, "precision", None)
    kind = type(plugin)
    if kind is Precision:
        return _Full()
    if kind is DoublePrecision:
        return _Double()
    if kind is HalfPrecision and name == "bf16-true":
        return _Half("bf16-true")
    if isinstance(plugin, MixedPrecision) and kind is MixedPrecision:
        return _Mixed("bf16-mixed", plugin.device) if name == "bf16-mixed" else _with_scaler(plugin)
    raise ValueError(
        f"ParoStrategy does not support precision {name!r} ({kind.__name__}); expected one of {', '.join(_SUPPORTED)}, "
        "by name or as the plugin of Lightning itself. HINT: on recent GPUs use precision='bf16-mixed'."
    )


def _with_scaler(plugin: MixedPrecision) -> _Mixed:
    given = plugin.scaler
    assert given is not None
    scaler = _Scaler(plugin.device, enabled=given.is_enabled())
    scaler.load_state_dict(given.state_dict())  # a scaler that is not enabled has none, and takes none
    mixed = _Mixed("16-mixed", plugin.device, scaler)
    scaler.plugin = mixed
    return mixed


def policy_for(plugin: Precision, grad_dtype: Any = None, reduce_dtype: Any = None) -> PrecisionPolicy:
    """The engine's dtypes for a precision plugin.

    Args:
        plugin: A plugin made by :func:`adopt`.
        grad_dtype: Dtype of the gradient accumulator, ``"float32"`` or ``"bfloat16"``; None is the table's.
        reduce_dtype: Wire dtype of gradients inside and between groups; None is the table's.

    Raises:
        ValueError: If a dtype does not fit the precision.
    """
    name = str(plugin.precision)
    accumulator = _dtype("grad_dtype", grad_dtype, name)
    wire = _dtype("reduce_dtype", reduce_dtype, name)
    compute = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
    inter = wire or (torch.float32 if name == "16-mixed" else None)
    return PrecisionPolicy(compute, compute is not None, accumulator, wire, inter)


def _dtype(argument: str, value: Any, precision: str) -> torch.dtype | None:
    if value is None:
        return None
    dtype: torch.dtype = getattr(torch, fitting_dtype(argument, value, precision))
    return dtype
