"""SμPar for a LightningModule: initial values, masks, forward factors, and param groups by a plan."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_paro.algorithms.supar import MaskState, SuParPlan, initialize, prefix_of, scale_forward
from lightning_paro.algorithms.supar.init import check_names
from lightning_paro.algorithms.supar.plan import difference
from lightning_paro.callbacks import ParamGroupGuard, SparseMask

__all__ = ["SuParMixin"]

HPARAM = "supar_plan"
"""Where the plan is in hparams and in checkpoints."""


class SuParMixin:
    """Trains a wide or sparse model with hyperparameters that were tuned on a narrow and dense one.

    Stands before LightningModule: ``class Writer(SuParMixin, LightningModule)``.

    Reference: Dey et al., "Sparse maximal update parameterization: A holistic approach to sparse training dynamics",
    NeurIPS 2024, table 1.

    Example::

        class Writer(SuParMixin, LightningModule):
            def __init__(self):
                super().__init__()
                self.model = GPT2LMHeadModel(config)
                self.supar_setup(SuParPlan.from_model(self, base_width=256, density=1 / 8))

            def configure_optimizers(self):
                return torch.optim.AdamW(self.supar_param_groups(lr=1e-2, weight_decay=0.1))
    """

    supar_plan: SuParPlan | None = None
    """The plan of :meth:`supar_setup`."""
    supar_masks: MaskState | None = None
    """Where masks come from, if the plan has any."""
    _supar_prefix = ""
    _supar_built: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no child of the module
    _supar_callbacks = False  # whether they were given to a Trainer

    def supar_setup(self, plan: SuParPlan) -> None:
        """Draw initial values, set masked weights to zero, and put the plan's factors into the forward.

        Call it in ``__init__`` or ``configure_model``, on real tensors, before anything wraps or shards the model. A
        second call with the same plan does nothing, so values that were trained stay, unless the model was built anew.

        Raises:
            ValueError: If the plan is of another model, tensors are not there yet, or it was set up with another plan.
        """
        module = self._module()
        prefix = prefix_of(module, plan) if self.supar_plan is None else self._supar_prefix
        place = (prefix + next(iter(plan))).rpartition(".")[0]
        if self.supar_plan is not None:
            if self.supar_plan != plan:
                raise ValueError(
                    f"supar_setup was called before with another plan: {difference(self.supar_plan, plan)}. HINT: one "
                    "plan a module; build a new module for another."
                )
            if module.get_submodule(place) is self._supar_built[0]:
                return
        initialize(module, plan, prefix)
        scale_forward(module, plan, prefix)
        self.supar_plan, self._supar_prefix = plan, prefix
        self._supar_built = (module.get_submodule(place),)
        if plan.sparse and self.supar_masks is None:
            self.supar_masks = MaskState(plan, prefix)
            self.supar_masks.attach(module)
        self.hparams[HPARAM] = plan.to_dict()  # type: ignore[attr-defined]

    def supar_param_groups(
        self,
        lr: float,
        weight_decay: float = 0.0,
        mode: Literal["invariant", "paper"] = "invariant",
        optimizer: Literal["adamw", "sgd"] = "adamw",
    ) -> list[dict[str, Any]]:
        """Param groups for an optimizer, with the learning rate and the weight decay of each tensor.

        Args:
            lr: Learning rate of the base model.
            weight_decay: Weight decay of the base model; vectors do not decay.
            mode: ``"invariant"``: decay times learning rate is the base model's for every tensor. ``"paper"``: the
                decay is the same number for all matrices, as in the reference code, so with AdamW hidden weights of a
                sparse model decay faster.
            optimizer: Whose rules: ``"adamw"``, also for Adam, or ``"sgd"``.

        Returns:
            Groups with ``params``, ``lr``, ``weight_decay`` and, for :class:`~lightning_paro.callbacks.ParamGroupGuard`
            and to be read, ``lr_factor``, ``is_hidden`` and ``rule``, whose rules they are.

        Raises:
            ValueError: If an argument is not understood, or parameters were renamed since.
            RuntimeError: If there is no plan yet.
        """
        plan = self.supar_plan
        if plan is None:
            raise RuntimeError("there is no plan yet. HINT: call supar_setup(plan) before supar_param_groups(...).")
        check_names(self._module(), (self._supar_prefix + name for name in plan))
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(f"{name}={value!r} must be a number, 0 or more.")
        if mode not in ("invariant", "paper") or optimizer not in ("adamw", "sgd"):
            raise ValueError(
                f"mode={mode!r}, optimizer={optimizer!r}: expected 'invariant' or 'paper', and 'adamw' or 'sgd'. HINT: "
                "the factors of other optimizers are not known; derive them and set overrides."
            )
        groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        for name, parameter in self._module().named_parameters():
            if not parameter.requires_grad:
                continue
            entry = (
                plan.entries.get(name.removeprefix(self._supar_prefix)) if name.startswith(self._supar_prefix) else None
            )
            factor, decay = 1.0, float(parameter.ndim > 1)
            if entry is not None:
                factor = entry.lr_factor if optimizer == "adamw" else entry.sgd_lr_factor
                decay = entry.weight_decay_factor if optimizer == "adamw" else bool(entry.weight_decay_factor) / factor
                decay = decay if mode == "invariant" else float(decay > 0)
            is_hidden = entry is not None and entry.role == "hidden"
            groups.setdefault((factor, decay, is_hidden), []).append(parameter)
        return [
            {
                "params": parameters,
                "lr": lr * factor,
                "weight_decay": weight_decay * decay,
                "lr_factor": factor,
                "is_hidden": is_hidden,
                "rule": optimizer,
            }
            for (factor, decay, is_hidden), parameters in groups.items()
        ]

    @property
    def hparams_initial(self) -> Any:
        """What loggers are given: the plan's digest in place of every tensor."""
        initial = super().hparams_initial  # type: ignore[misc]
        if self.supar_plan is not None:
            initial[HPARAM] = self.supar_plan.digest
        return initial

    def configure_callbacks(self) -> list[Any]:
        """Masks, and the ratios of learning rates, are kept by callbacks, unless the Trainer has them already."""
        self._supar_callbacks = True
        is_dense = self.supar_plan is not None and self.supar_masks is None  # a plan of configure_model may have masks
        wanted = [ParamGroupGuard] if is_dense else [SparseMask, ParamGroupGuard]
        there = self.trainer.callbacks  # type: ignore[attr-defined]
        missing = [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in there)]
        return [*super().configure_callbacks(), *missing]  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Refuse a training whose masks nobody keeps, or that is not of this model."""
        super().on_train_start()  # type: ignore[misc]
        there = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.supar_plan is not None and any(type(callback).__name__ == "_LRCallback" for callback in there):
            raise RuntimeError(
                "the learning rate finder (lr_find) trains without masks and with one learning rate for all groups, so "
                "it would find another model's. HINT: lightning_paro.experiments.lr_transfer_sweep, on a small dense "
                "model; its learning rate carries over."
            )
        is_kept = self._supar_callbacks or any(isinstance(callback, SparseMask) for callback in there)
        if self.supar_masks is not None and not is_kept:
            raise RuntimeError(
                "the plan has masks, and no SparseMask keeps them: masked weights would be trained. HINT: "
                "configure_callbacks of the module is to return what super().configure_callbacks() does, and more; or "
                "Trainer(callbacks=[SparseMask()])."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The plan has a place of its own: what builds a module from hparams does not know of it."""
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        hparams = checkpoint.get("hyper_parameters", {})
        if HPARAM in hparams:
            checkpoint[HPARAM] = hparams[HPARAM]
            checkpoint["hyper_parameters"] = {key: value for key, value in hparams.items() if key != HPARAM}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another plan: its moments and learning rates would not fit."""
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]
        saved = checkpoint.get(HPARAM)
        if saved is None and self.supar_plan is not None and self._is_resuming():
            raise ValueError(
                "the checkpoint is of a training without a plan, whose learning rates and moments do not fit. HINT: "
                "load only the weights, by load_state_dict(checkpoint['state_dict'], strict=False)."
            )
        if saved is not None and self.supar_plan is not None and SuParPlan.from_dict(saved) != self.supar_plan:
            raise ValueError(
                f"the checkpoint is of another plan: {difference(SuParPlan.from_dict(saved), self.supar_plan)}. HINT: "
                "make the plan as in the run that was saved, or load only the weights."
            )

    def _is_resuming(self) -> bool:
        """Whether optimizers are loaded too."""
        trainer = self._trainer  # type: ignore[attr-defined]
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    def _module(self) -> nn.Module:
        if not isinstance(self, nn.Module):
            raise TypeError(
                f"{type(self).__name__} is no LightningModule. HINT: class Model(SuParMixin, LightningModule)."
            )
        return self
