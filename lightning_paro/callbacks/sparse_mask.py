"""Sparsity in training: what a mask does not keep has no gradient, no moments, and is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_paro.algorithms.supar import Masks, MaskState, SuParPlan
from lightning_paro.algorithms.supar.dynamic import Rule
from lightning_paro.algorithms.supar.init import check_names
from lightning_paro.algorithms.supar.mask_state import attached
from lightning_paro.algorithms.supar.masks import Kind
from lightning_paro.algorithms.supar.roles import without_role
from lightning_paro.callbacks._accord import in_accord, told_by_all
from lightning_paro.callbacks._dynamic_masks import DynamicMasks
from lightning_paro.state_access import Shard, is_elementwise, state_access
from lightning_paro.strategies import ParoStrategy

__all__ = ["SparseMask"]


class SparseMask(Callback):
    """Trains with masks that are drawn before training and stay, or with ``dynamic`` follow magnitudes.

    A module that was set up with a :class:`~lightning_paro.algorithms.supar.SuParPlan` has its masks from there, and
    needs no arguments here. Of any other module the projections of the blocks are made sparse; nothing else is changed.
    Masks depend on the seed and on the parameters' names only, so they are the same on every rank. The state dict has
    them, in module and checkpoint, as bool tensors of the parameter's shape under its name with ``_mask`` behind; one
    that is loaded wins over the seed's. A rank keeps only what its own part of each parameter needs.

    Dynamic masks change after every so many steps, right before the next step of the optimizer. ``"rigl"`` begins with
    the drawn masks, drops the smallest living weights and grows as many where the gradient is largest; the share that
    is dropped falls as a cosine. ``"gmp"`` begins dense, also the initial values, and keeps the largest weights, down
    to ``density`` as a cube; a plan with masks is for weights that are sparse from the start, so it is refused. In the
    original RigL the change takes the place of a step; here the step follows: what is dropped or grown is zero with
    moments of zero, and the gradient is that of the new mask. Masks are in the state dict, so a resumed training goes
    on with those it had. Every rank has them whole on the host, one byte a weight. A warning says that hyperparameters
    do not carry over.

    Args:
        density: Share of weights that are kept; None is the module's plan.
        kind: How masks are drawn, see :class:`~lightning_paro.algorithms.supar.Masks`.
        seed: Of the draws.
        exclude: Patterns of parameter names that stay dense.
        n: Of ``kind="nm"``: so many are kept.
        m: Of ``kind="nm"``: of so many neighbours along the fan-in.
        block: Side of the squares of ``kind="block"``.
        path: File of the masks of ``kind="file"``.
        dynamic: None for static masks, ``"rigl"``, also with the masks of a plan, or ``"gmp"``.
        every: Of dynamic masks: steps from one change to the next.
        drop_fraction: Of ``"rigl"``: share of living weights that are dropped at first.
        until: Of dynamic masks: share of the training's steps after which they stay.

    Raises:
        ValueError: If an argument is not understood, the module has a plan and there are arguments for other masks, or
            masks are dynamic and the training has no known end.

    References: Evci et al., "Rigging the lottery: Making all tickets winners", ICML 2020, with their cosine until three
    quarters of the training; Zhu and Gupta, "To prune, or not to prune", 2017. Dey et al. change masks every 100 steps
    and drop 0.3.
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
        dynamic: Rule | None = None,
        every: int = 100,
        drop_fraction: float = 0.3,
        until: float = 0.75,
    ) -> None:
        self._dynamic = DynamicMasks(dynamic, every, drop_fraction, until) if dynamic is not None else None
        if self._dynamic is not None:
            self._dynamic.check_kind(kind)
        if isinstance(exclude, str):
            raise ValueError(f"exclude={exclude!r} must be several patterns. HINT: exclude=({exclude!r},).")
        is_asked = density is not None or kind in ("nm", "file")
        self._masks = Masks(kind, 1.0 if density is None else density, n, m, block, path, seed) if is_asked else None
        self._exclude = tuple(exclude)
        if self._masks is None and (kind, seed, self._exclude, path) != ("random", 0, (), None):
            raise ValueError(
                f"SparseMask has kind={kind!r}, seed={seed}, exclude={self._exclude}, path={path!r}, and no density. "
                "HINT: SparseMask(density=0.25, ...); without arguments it has the masks of the module's plan."
            )
        self.masks: MaskState | None = None
        """Where masks come from, once the callback is set up."""
        self._dropped: dict[str, Tensor] = {}  # of this rank's parts: what is not kept
        self._is_elementwise = False  # whether all optimizers are known to be
        self._is_kept = False  # by optimizers: whether what is zero, without gradient and moments, is sure to stay zero
        self._step = 0
        self._frozen: set[str] = set()  # names of what has a mask and was not trained yet: the same on all ranks
        self._hooks: list[RemovableHandle] = []  # after steps of optimizers

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise ValueError(
                f"{type(trainer.strategy).__name__} does not say which part of a parameter a rank holds, so masks "
                "cannot be kept. HINT: Trainer(strategy='paro_ggg'), ModelParallelStrategy, or DDP."
            )
        if self._dynamic is not None:
            self._dynamic.check_callbacks(trainer)
            if self._masks is not None and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
                raise ValueError(
                    "dynamic masks that are no plan's are lost when processes that were spawned or forked end. HINT: a "
                    "strategy that starts scripts, such as 'ddp'."
                )
        if any(isinstance(callback, LearningRateFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_warn(
                "the learning rate finder trains without SparseMask, so what it suggests is for the dense model. HINT: "
                "lightning_paro.experiments.lr_transfer_sweep."
            )
        self.masks = None
        is_later = hasattr(pl_module, "supar_plan") and pl_module.supar_plan is None and self._masks is None
        if not is_later:  # else the plan is made in configure_model
            self._find_masks(pl_module, stage)

    def _find_masks(self, module: LightningModule, stage: str) -> None:
        """Those of the module's plan, those that the module had in an earlier training, or those of the arguments."""
        own: MaskState | None = getattr(module, "supar_masks", None)
        name = type(module).__name__
        if own is not None and self._masks is not None:
            raise ValueError(
                f"{name} has the masks of its plan, and SparseMask has arguments for others. HINT: SparseMask() "
                "without arguments, and the density in SuParPlan.from_model."
            )
        if own is not None:
            if self._dynamic is not None:
                self._dynamic.check_plan(name, own.plan(module).masks)
            self.masks = own
            return
        if self._masks is None and (self._dynamic is not None or not hasattr(module, "supar_plan")):
            if stage == "fit":
                plan = "a dense plan" if hasattr(module, "supar_plan") else "no plan"
                raise ValueError(f"SparseMask() has no density, and the module {plan}. HINT: SparseMask(density=0.25).")
            return
        if self._masks is not None and self._dynamic is None and hasattr(module, "supar_plan") and stage == "fit":
            rank_zero_warn(
                f"{name} has a dense plan, so its initial values and learning rates know nothing of the density of "
                "SparseMask. HINT: SuParPlan.from_model(density=...), and SparseMask() without one."
            )
        is_dense_first = self._dynamic is not None and self._dynamic.rule == "gmp"
        self.masks = self.masks or attached(module)
        if self.masks is None:
            self.masks = MaskState(self._plan, is_dense_first=is_dense_first)
            self.masks.attach(module)

    def _plan(self, module: nn.Module) -> SuParPlan:
        """Masks alone: of a model that is its own base, and as SP, nothing else follows from it."""
        others = dict.fromkeys(without_role(module), {"role": "vector"})  # no projections of blocks
        masks = self._masks or Masks()
        return SuParPlan.from_model(
            module, base_config=module, parameterization="sp", masks=masks, exclude=self._exclude, overrides=others
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take this rank's part of every mask, and apply it to what was built or loaded."""
        with in_accord("SparseMask", trainer.world_size, lambda: self._description(pl_module)):
            self._find_masks(pl_module, "fit")
            self._check_masks(pl_module)
        assert self.masks is not None
        self._is_elementwise, self._step = all(map(is_elementwise, trainer.optimizers)), trainer.global_step
        is_half = any(parameter.dtype is torch.float16 for parameter in pl_module.parameters())  # Adam's eps is 0 there
        self._is_kept = self._is_elementwise and not is_half
        access = state_access(trainer)
        names = self.masks.names(pl_module)
        held = set().union(*told_by_all(list(access.trainable_shards()), trainer.world_size))
        others = [name for name in names if name not in held]  # frozen, or of no optimizer
        if others:
            with access.full_parameters(pl_module, writeback=True), torch.no_grad():
                for name in others:
                    parameter = pl_module.get_parameter(name)
                    parameter.data.mul_(self.masks.mask(pl_module, name).to(parameter.device))
        shards = access.trainable_shards()
        if self._dynamic is not None:
            self._dynamic.begin(trainer)
            self._dynamic.place(self._sizes(pl_module), shards)
        self._dropped = {}
        self._frozen = {name for name in names if not pl_module.get_parameter(name).requires_grad}
        self._take(pl_module, shards)
        access.update_parameters()
        is_seen = not isinstance(trainer.strategy, ParoStrategy)  # whether parameters have moved when a step returns
        if is_seen and not self._is_kept and all(isinstance(each, Optimizer) for each in trainer.optimizers):
            optimizers = trainer.optimizers
            self._hooks = [each.register_step_post_hook(lambda *_: self._clear_all(trainer)) for each in optimizers]

    def _check_masks(self, module: LightningModule) -> None:
        assert self.masks is not None
        check_names(module, self.masks.names(module))
        self.masks.check(module)
        if self._masks is not None and self.masks.plan(module) != (wanted := self._plan(module)):
            there, here = self.masks.plan(module).masks, wanted.masks
            raise ValueError(
                f"{type(module).__name__} was trained with other masks before: {there} there, {here} here, or other "
                "patterns in exclude. HINT: a new module, or a SparseMask with the same arguments."
            )

    def _description(self, module: LightningModule) -> dict[str, Any]:
        assert self.masks is not None
        dynamic = self._dynamic.settings if self._dynamic is not None else None
        return {"masks": self.masks.plan(module).digest, "dynamic masks": dynamic}

    def _sizes(self, module: LightningModule) -> dict[str, int]:
        """Elements of every parameter that has a mask."""
        assert self.masks is not None
        return {name: math.prod(self.masks.entry(module, name).shape) for name in self.masks.names(module)}

    def _take(self, module: LightningModule, shards: Mapping[str, Shard]) -> None:
        """Take this rank's part of masks that it has not yet, of what is trained now."""
        assert self.masks is not None
        new = [name for name in self.masks.names(module) if name in shards and name not in self._dropped]
        with torch.no_grad():
            for name in new:
                self._dropped[name] = ~_part(self.masks.mask(module, name), shards[name])
                _clear(shards[name], self._dropped[name], is_elementwise=self._is_elementwise)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Before gradients are clipped: change dynamic masks; of what is not kept there are no gradients."""
        access = state_access(trainer)
        shards = access.trainable_shards()
        self._take(pl_module, shards)
        step, dynamic = trainer.global_step, self._dynamic
        unfrozen = {name for name in self._frozen if pl_module.get_parameter(name).requires_grad}
        self._frozen -= unfrozen
        if dynamic is not None:
            if unfrozen:
                dynamic.place(self._sizes(pl_module), shards)
            late = unfrozen if dynamic.is_pruning else set()  # as dense as at first
            changing = [name for name in dynamic.names if dynamic.is_due(step) or name in late]
            with torch.no_grad():
                self._change(dynamic, changing, step, pl_module, shards)
        if unfrozen or (dynamic is not None and dynamic.is_due(step)):
            access.update_parameters()  # at once, as a scaler of gradients may skip the step
        self._mask_gradients(shards)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where the user clips, that comes before :meth:`on_before_optimizer_step`."""
        if not pl_module.automatic_optimization and self._dynamic is None:
            self._mask_gradients(state_access(trainer).trainable_shards())

    def _mask_gradients(self, shards: Mapping[str, Shard]) -> None:
        for name in self._dropped.keys() & shards.keys():
            gradient = shards[name].grad
            if gradient is not None:
                gradient.masked_fill_(self._dropped[name], 0)

    def _change(
        self, dynamic: DynamicMasks, names: Sequence[str], step: int, module: LightningModule,
        shards: Mapping[str, Shard],
    ) -> None:  # fmt: skip
        """Take the next masks and clear what they drop; what they grow was masked, so it is zero without moments."""
        assert self.masks is not None
        for name in names:  # on all ranks, whether they hold some of it or not
            mask, rho, shard = self.masks.mask(module, name), self.masks.entry(module, name).rho, shards.get(name)
            mask = dynamic.new_mask(name, mask, rho, shard, step)
            self.masks.replace(name, mask)
            if shard is not None:
                self._dropped[name] = ~_part(mask, shard)
                _clear(shard, self._dropped[name], is_elementwise=self._is_elementwise)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Where a step could not be followed by a look at once, look now whether it has moved what is masked."""
        if trainer.global_step == self._step or self._is_kept or self._hooks:
            return
        self._step = trainer.global_step
        self._clear_all(trainer)

    def _clear_all(self, trainer: Trainer) -> None:
        """Look whether an optimizer has moved what is masked, and take that back."""
        access = state_access(trainer)
        shards = access.trainable_shards()
        there = self._dropped.keys() & shards.keys()
        living = any(bool(shards[name].value[self._dropped[name]].any()) for name in there)
        if trainer.strategy.reduce_boolean_decision(living, all=False):
            with torch.no_grad():
                for name in there:
                    _clear(shards[name], self._dropped[name], is_elementwise=self._is_elementwise)
            access.update_parameters()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._dropped = {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _part(mask: Tensor, shard: Shard) -> Tensor:
    """What a rank needs of a whole mask."""
    here = mask.flatten()[shard.offset : shard.offset + shard.value.numel()]
    return here.view(shard.value.shape).to(shard.value.device)


def _clear(shard: Shard, dropped: Tensor, is_elementwise: bool) -> None:
    """Zero values of what is not kept, and moments where they are known to be an element's own."""
    shard.value.masked_fill_(dropped, 0)
    for value in shard.state.values() if is_elementwise else ():
        if isinstance(value, Tensor) and value.shape == dropped.shape:
            value.masked_fill_(dropped, 0)
