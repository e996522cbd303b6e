"""Masks that follow magnitudes: RigL and gradual magnitude pruning (GMP).

Pure functions of whole tensors; counts are exact, and of equal magnitudes the first in the flattened tensor are taken,
so that the result is the same on every rank and device.

References: Evci et al., "Rigging the lottery: Making all tickets winners", ICML 2020; Zhu and Gupta, "To prune, or not
to prune: exploring the efficacy of pruning for model compression", 2017.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["RULES", "Rule", "density_at", "drop_fraction_at", "prune", "rigl"]

Rule = Literal["rigl", "gmp"]
RULES: tuple[Rule, ...] = ("rigl", "gmp")


def drop_fraction_at(step: int, end: int, first: float) -> float:
    """RigL: share of the living weights that are dropped at a step, from ``first`` down to 0 by a cosine.

    Args:
        step: Steps that were made before.
        end: The step at which nothing is dropped any more.
        first: The share at step 0.
    """
    return first / 2 * (1 + math.cos(math.pi * min(step / end, 1)))


def density_at(step: int, end: int, final: float) -> float:
    """GMP: share of weights that live at a step, from 1 down to ``final``; what is left to prune falls as a cube.

    Args:
        step: Steps that were made before.
        end: The step from which on it is ``final``.
        final: The density in the end.
    """
    return final + (1 - final) * (1 - min(step / end, 1)) ** 3


def rigl(weight: Tensor, gradient: Tensor, mask: Tensor, drop: float) -> Tensor:
    """Drop the smallest of the living weights, and grow as many where the gradient is largest.

    As in the original, what was just dropped may be grown again, and then nothing has happened to it. A gradient of
    zeros, or with a number that is not finite, says nothing, so the mask stays.

    Args:
        weight: Whole, of any shape.
        gradient: Dense, of that shape.
        mask: Bool of that shape, True where a weight lives.
        drop: Share of the living to drop, rounded to whole weights.

    Returns:
        The new mask, of that shape, with as many living as before.
    """
    living = int(mask.sum())
    count = round(drop * living)
    if not count or not gradient.any() or not gradient.isfinite().all():
        return mask.clone()
    survivors = _largest(weight, mask, living - count)
    return survivors | _largest(gradient, ~survivors, count)


def prune(weight: Tensor, mask: Tensor, density: float) -> Tensor:
    """Keep the largest of the living weights; what was pruned before stays so.

    Args:
        weight: Whole, of any shape.
        mask: Bool of that shape, True where a weight lives.
        density: Share of all weights to keep, rounded to whole weights, of which at least one is kept.

    Returns:
        The new mask, of that shape.
    """
    return _largest(weight, mask, min(max(1, round(density * mask.numel())), int(mask.sum())))


def _largest(values: Tensor, among: Tensor, count: int) -> Tensor:
    """Where the largest magnitudes are, exactly so many; NaN counts as zero."""
    if not count:
        return torch.zeros_like(among)
    magnitude = values.abs().nan_to_num_().masked_fill_(~among, -1).flatten()
    last = magnitude.topk(count, sorted=False).values.min()  # which of equal ones topk takes is not defined
    chosen = magnitude > last
    ties = (magnitude == last).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen.view(among.shape)
