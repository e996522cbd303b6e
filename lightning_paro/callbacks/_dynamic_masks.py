"""Masks that change while a model is trained: when, and the same on every rank, whoever holds what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_paro.algorithms.supar.dynamic import RULES, Rule, density_at, drop_fraction_at, prune, rigl
from lightning_paro.algorithms.supar.masks import Kind, Masks
from lightning_paro.callbacks._accord import told_by_all
from lightning_paro.state_access import Shard

__all__ = ["DynamicMasks"]

Part = tuple[int, int, torch.dtype]
"""Of a flattened parameter: the first element that a rank holds, how many, and of which type."""


class DynamicMasks:
    """Finds new masks by :func:`~lightning_paro.algorithms.supar.dynamic.rigl` or ``prune``.

    One tensor at a time is put together from what ranks hold, on all of them, so that all find the same mask.

    Args:
        rule: ``"rigl"`` or ``"gmp"``.
        every: Steps from one change to the next.
        drop_fraction: Of RigL: the share of living weights that the first change would drop at step 0.
        until: The share of the training's steps after which masks stay.

    Raises:
        ValueError: If an argument is not understood.
    """

    def __init__(self, rule: Rule, every: int, drop_fraction: float, until: float) -> None:
        if rule not in RULES:
            raise ValueError(f"dynamic={rule!r} is none of {', '.join(RULES)}. HINT: leave it out for static masks.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a whole number of steps, 1 or more.")
        for name, value in (("drop_fraction", drop_fraction), ("until", until)):
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise ValueError(f"{name}={value!r} must be a share, above 0 and at most 1.")
        self.rule = rule
        self.names: list[str] = []
        """The tensors whose masks change: those that some rank trains a part of."""
        self._every, self._drop_fraction, self._until = every, drop_fraction, until
        self._end = 0
        self._is_mine: dict[str, bool] = {}  # whether this rank gives its part to the others, or one before it does
        self._dtypes: dict[str, torch.dtype] = {}
        self._device = torch.device("cpu")
        self._world_size, self._rank = 1, 0

    @property
    def settings(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks."""
        return self.rule, self._every, self._drop_fraction, self._until

    def check_kind(self, kind: Kind) -> None:
        """Refuse masks of a kind that would be lost.

        Raises:
            ValueError: If it would be.
        """
        fitting = ("random", "er") if self.rule == "gmp" else ("random", "bernoulli", "er", "file")
        if kind not in fitting:
            why = "begins dense and keeps the largest weights" if self.rule == "gmp" else "moves weights one by one"
            raise ValueError(
                f"kind={kind!r} with dynamic={self.rule!r}, which {why}; expected one of {', '.join(fitting)}. HINT: "
                "kind='random', or static masks."
            )

    def check_callbacks(self, trainer: Trainer) -> None:
        """Refuse averages of weights: those of what was dropped on the way are not zero.

        Raises:
            ValueError: If a callback of the trainer makes them.
        """
        averaging = (StochasticWeightAveraging, WeightAveraging)
        found = next((c for c in trainer.callbacks if isinstance(c, averaging)), None)  # type: ignore[attr-defined]
        if found is not None:
            raise ValueError(
                f"dynamic={self.rule!r} with {type(found).__name__}: the average of weights whose masks change is not "
                "masked. HINT: static masks, or no averaging."
            )

    def check_plan(self, who: str, masks: Masks) -> None:
        """Refuse the masks of a plan: pruning begins dense, and a plan with masks is for weights that do not.

        Args:
            who: Name of the module.
            masks: How those of its plan are drawn.

        Raises:
            ValueError: If they are of no use here.
        """
        if self.rule == "gmp":
            raise ValueError(
                f"{who} has a plan with masks, for weights that are sparse from the start, and dynamic='gmp' begins "
                f"dense. HINT: SuParPlan.from_model(density=1) and SparseMask(density={masks.density:g}, "
                "dynamic='gmp'); or dynamic='rigl'."
            )
        self.check_kind(masks.kind)

    def begin(self, trainer: Trainer) -> None:
        """Learn how long the training is. Collective.

        Args:
            trainer: About to train.

        Raises:
            ValueError: On all ranks alike: if the training has no end or several optimizers.
        """
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"dynamic={self.rule!r} with {len(trainer.optimizers)} optimizers; expected one, whose steps are "
                "counted. HINT: static masks."
            )
        self._device, self._world_size = trainer.strategy.root_device, trainer.world_size
        self._rank = trainer.global_rank
        steps = min(told_by_all(trainer.estimated_stepping_batches, self._world_size))
        if not 0 < steps < math.inf:
            raise ValueError(
                f"dynamic={self.rule!r} changes masks until {self._until:g} of the training's steps, and this training "
                "has no end that is known. HINT: Trainer(max_steps=...), or max_epochs with a dataset that has a "
                "length."
            )
        self._end = min(int(self._until * steps), int(steps) - 1)  # the last step has as many before it
        rank_zero_warn(
            f"SparseMask(dynamic={self.rule!r}): hyperparameters do not carry over to masks that follow magnitudes. "
            "Weights that survive are larger than the rules suppose, so SμPar corrects too much (Dey et al., figure "
            "12). HINT: static masks, or tune at this density."
        )
        if self._end < self._every:
            rank_zero_warn(
                f"SparseMask(dynamic={self.rule!r}) never changes a mask: every={self._every} steps, but masks stay "
                f"after {self._end} of {steps:g}. HINT: every={max(1, self._end // 10)}."
            )

    def place(self, sizes: Mapping[str, int], shards: Mapping[str, Shard]) -> None:
        """Learn who holds what, when training begins and when more is trained. Collective.

        Args:
            sizes: Elements of every tensor that has a mask.
            shards: What this rank holds.

        Raises:
            ValueError: On all ranks alike: if parameters are split other than along their first dimension.
        """
        parts: dict[str, Part] = {
            name: (shards[name].offset, shards[name].value.numel(), shards[name].value.dtype)
            for name in sizes
            if name in shards and shards[name].value.numel()
        }
        self._place(told_by_all(parts, self._world_size), self._rank, sizes)

    @property
    def is_pruning(self) -> bool:
        """Whether masks become sparser while this training goes on."""
        return self.rule == "gmp" and self._end >= self._every

    def is_due(self, step: int) -> bool:
        """Whether masks change after so many steps."""
        return 0 < step <= self._end and step % self._every == 0

    def new_mask(self, name: str, mask: Tensor, rho: float, shard: Shard | None, step: int) -> Tensor:
        """The next mask of a tensor. Collective, for the tensors of ``names`` in their order.

        Args:
            name: Of the tensor.
            mask: The present one, whole.
            rho: The density that pruning leaves in the end.
            shard: What this rank holds, with the gradient before it was masked.
            step: Steps that were made before.

        Returns:
            Bool of the shape of ``mask``, on the training's device.
        """
        rows = 2 if self.rule == "rigl" else 1  # values, and gradients
        whole = torch.zeros(rows, mask.numel(), dtype=self._dtypes[name], device=self._device)
        if shard is not None and self._is_mine[name]:
            here = slice(shard.offset, shard.offset + shard.value.numel())
            whole[0, here] = shard.value.flatten()
            if self.rule == "rigl" and shard.grad is not None:
                whole[1, here] = shard.grad.flatten()
        if self._world_size > 1:
            torch.distributed.all_reduce(whole)  # one value and zeros: exact, whatever the order
        weight, now = whole[0].view(mask.shape), mask.to(self._device)
        if self.rule == "gmp":
            return prune(weight, now, density_at(step, self._end // self._every * self._every, rho))
        drop = drop_fraction_at(step, self._end, self._drop_fraction)
        return rigl(weight, whole[1].view(mask.shape), now, drop)

    def _place(self, told: list[dict[str, Part]], rank: int, sizes: Mapping[str, int]) -> None:
        """Of parts that lie on several ranks the first gives it to all."""
        self.names = [name for name in sizes if any(name in parts for parts in told)]
        for name in self.names:
            held = [parts.get(name) for parts in told]
            part = held[rank]
            self._is_mine[name] = part is not None and part not in held[:rank]
            self._dtypes[name] = next(part[2] for part in held if part is not None)
            if not _is_whole({part[:2] for part in held if part is not None}, sizes[name]):
                raise ValueError(
                    f"ranks hold of '{name}', {sizes[name]} elements, {held}: these (first element, number, type) do "
                    f"not follow each other, so dynamic={self.rule!r} cannot put it together. HINT: shard parameters "
                    "along their first dimension, without tensor parallelism."
                )


def _is_whole(parts: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether parts follow each other from the first element to the last."""
    end = 0
    for offset, count in sorted(parts):
        if offset != end:
            return False
        end += count
    return end == size
