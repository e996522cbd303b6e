"""Static sparsity in training: what a mask does not keep has no gradient, no moments, and is zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_paro.algorithms.supar import Masks, MaskState, SuParPlan
from lightning_paro.algorithms.supar.masks import Kind
from lightning_paro.algorithms.supar.roles import find_roles, width_of
from lightning_paro.state_access import Shard, state_access

__all__ = ["SparseMask"]


class SparseMask(Callback):
    """Trains with masks that are drawn before training and stay.

    A module that was set up with a :class:`~lightning_paro.algorithms.supar.SuParPlan` has its masks from there, and
    needs no arguments here. Of any other module the projections of the blocks are made sparse; nothing else is changed.
    Masks depend on the seed and on the parameters' names only, so they are the same on every rank. The state dict has
    them, in module and checkpoint, as bool tensors of the parameter's shape under its name with ``_mask`` behind; one
    that is loaded wins over the seed's. A rank keeps only what its own part of each parameter needs.

    Args:
        density: Share of weights that are kept; None is the module's plan.
        kind: How masks are drawn, see :class:`~lightning_paro.algorithms.supar.Masks`.
        seed: Of the draws.
        exclude: Patterns of parameter names that stay dense.
        n: Of ``kind="nm"``: so many are kept.
        m: Of ``kind="nm"``: of so many neighbours along the fan-in.
        block: Side of the squares of ``kind="block"``.
        path: File of the masks of ``kind="file"``.

    Raises:
        ValueError: If an argument is not understood, or the module has a plan and there are arguments as well.
    """

    def __init__(
        self,
        density: float | None = None,
        kind: Kind = "random",
        seed: int = 0,
        exclude: Sequence[str] = (),
        n: int = 2,
        m: int = 4,
        block: int = 16,
        path: str | None = None,
    ) -> None:
        is_asked = density is not None or kind in ("nm", "file")
        self._masks = Masks(kind, 1.0 if density is None else density, n, m, block, path, seed) if is_asked else None
        self._exclude = tuple(exclude)
        self.masks: MaskState | None = None
        """Where masks come from, once the callback is set up."""
        self._dropped: dict[str, Tensor] = {}  # of this rank's parts: what is not kept
        self._is_kept: bool | None = None  # by the optimizer: whether what is zero and has no gradient stays zero
        self._step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        own: MaskState | None = getattr(pl_module, "supar_masks", None)
        if own is not None and self._masks is not None:
            raise ValueError(
                f"{type(pl_module).__name__} has the masks of its plan, and SparseMask has arguments for others. HINT: "
                "SparseMask() without arguments, and the density in SuParPlan.from_model."
            )
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise ValueError(
                f"{type(trainer.strategy).__name__} does not say which part of a parameter a rank holds, so masks "
                "cannot be kept. HINT: Trainer(strategy='paro_ggg'), ModelParallelStrategy, or DDP."
            )
        if own is not None:
            self.masks = own
        elif self.masks is None:
            if self._masks is None and stage == "fit" and not hasattr(pl_module, "supar_plan"):
                raise ValueError("SparseMask() has no density, and the module no plan. HINT: SparseMask(density=0.25).")
            self.masks = MaskState(self._plan)
            self.masks.attach(pl_module)

    def _plan(self, module: nn.Module) -> SuParPlan:
        """Masks alone: with a width multiplier of 1 and as SP nothing else follows from it."""
        width = width_of(module, find_roles(module, {}))
        masks = self._masks or Masks()
        return SuParPlan.from_model(module, base_width=width, parameterization="sp", masks=masks, exclude=self._exclude)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take this rank's part of every mask, and apply it to what was built or loaded."""
        assert self.masks is not None
        self._is_kept, self._step = None, trainer.global_step
        access = state_access(trainer)
        shards = access.trainable_shards()
        self._dropped = {}
        for name in self.masks.names(pl_module):
            if name in shards:
                shard = shards[name]
                kept = self.masks.mask(pl_module, name).flatten()[shard.offset : shard.offset + shard.value.numel()]
                self._dropped[name] = ~kept.view(shard.value.shape).to(shard.value.device)
        with torch.no_grad():
            for name, dropped in self._dropped.items():
                _clear(shards[name], dropped)
        access.update_parameters()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Before gradients are clipped: of what is not kept they are none."""
        shards = state_access(trainer).trainable_shards()
        for name, dropped in self._dropped.items():
            gradient = shards[name].grad
            if gradient is not None:
                gradient.masked_fill_(dropped, 0)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the first step, look whether the optimizer has left masked weights at zero; if not, see to it."""
        if trainer.global_step == self._step or self._is_kept:
            return
        self._step = trainer.global_step
        access = state_access(trainer)
        shards = access.trainable_shards()
        if self._is_kept is None:
            living = any(bool(shards[name].value[dropped].any()) for name, dropped in self._dropped.items())
            self._is_kept = trainer.strategy.reduce_boolean_decision(not living, all=True)
        if not self._is_kept:
            with torch.no_grad():
                for name, dropped in self._dropped.items():
                    _clear(shards[name], dropped)
            access.update_parameters()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._dropped = {}


def _clear(shard: Shard, dropped: Tensor) -> None:
    """Zero values and moments of what is not kept; elementwise optimizers leave them so where gradients are zero."""
    shard.value.masked_fill_(dropped, 0)
    for value in shard.state.values():
        if isinstance(value, Tensor) and value.shape == dropped.shape and value.numel() > 1:
            value.masked_fill_(dropped, 0)
