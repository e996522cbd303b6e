"""RigL and pruning equal plain loops, keep exact counts, and tell equal magnitudes apart by their place."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_paro.algorithms.supar.dynamic import density_at, drop_fraction_at, prune, rigl


def largest(values: list[float], places: list[int], count: int) -> list[int]:
    """The oracle: Python's sort is stable, so of equal magnitudes the first comes first."""
    return sorted(sorted(places), key=lambda place: -abs(values[place]))[:count]


def by_loops(weight: Tensor, gradient: Tensor, mask: Tensor, drop: float) -> Tensor:
    living = [place for place, is_living in enumerate(mask.flatten().tolist()) if is_living]
    count = round(drop * len(living))
    survivors = largest(weight.flatten().tolist(), living, len(living) - count)
    others = [place for place in range(mask.numel()) if place not in survivors]
    found = torch.zeros(mask.numel(), dtype=torch.bool)
    found[[*survivors, *largest(gradient.flatten().tolist(), others, count)]] = True
    return found.view(mask.shape)


def drawn(shape: tuple[int, ...], density: float, levels: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights that are zero where they are masked, gradients, and a mask; with few levels there are many ties."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    if levels:
        weight, gradient = (weight * levels).round() / levels, (gradient * levels).round() / levels
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[torch.randperm(mask.numel(), generator=generator)[: round(density * mask.numel())]] = True
    return weight * mask.view(shape), gradient, mask.view(shape)


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("drop", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("density", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(7, 13), (3, 4, 5)])
def test_rigl_equals_a_loop(shape: tuple[int, ...], density: float, drop: float, levels: int) -> None:
    weight, gradient, mask = drawn(shape, density, levels)
    before = mask.clone()
    found = rigl(weight, gradient, mask, drop)
    assert torch.equal(found, by_loops(weight, gradient, mask, drop))
    assert found.sum() == mask.sum()
    assert torch.equal(mask, before)


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("density", [1e-6, 0.1, 0.5, 0.99, 1.0])
def test_pruning_equals_a_loop(density: float, levels: int) -> None:
    weight, _, mask = drawn((7, 13), 0.6, levels)
    living = [place for place, is_living in enumerate(mask.flatten().tolist()) if is_living]
    kept = largest(weight.flatten().tolist(), living, max(1, round(density * 91)))
    found = prune(weight, mask, density)
    assert found.flatten().nonzero().flatten().tolist() == sorted(kept)
    assert not (found & ~mask).any()


def test_of_equal_magnitudes_the_first_are_taken() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    ones = torch.ones(2, 3)
    assert prune(-ones, mask, 0.5).tolist() == [[True, True, False], [True, False, False]]
    assert rigl(ones, -ones, mask, 0.5).tolist() == [[True, True, True], [True, False, False]]


def test_many_of_few_values() -> None:
    """In bfloat16, where most weights have equals."""
    weight = torch.randn(512, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = torch.ones(512, 300, dtype=torch.bool)
    found = prune(weight, mask, 0.37)
    assert int(found.sum()) == round(0.37 * mask.numel())
    last = weight[found].abs().min()
    assert weight[~found].abs().max() <= last
    ties = (weight.abs() == last).flatten()
    assert 1 < int((ties & found.flatten()).sum()) < int(ties.sum())
    assert found.flatten()[ties].int().diff().le(0).all()
    assert torch.equal(found, prune(weight.float(), mask, 0.37))


def test_a_gradient_of_zeros_changes_nothing() -> None:
    weight, gradient, mask = drawn((7, 13), 0.5)
    assert torch.equal(rigl(weight, torch.zeros_like(gradient), mask, 0.3), mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_overflowed_say_nothing(bad: float) -> None:
    weight, gradient, mask = drawn((7, 13), 0.5)
    gradient[1, 2] = bad
    assert torch.equal(rigl(weight, gradient, mask, 0.5), mask)


@pytest.mark.gpu
def test_a_gpu_chooses_the_same() -> None:
    weight, gradient, mask = drawn((512, 300), 0.4, levels=20)
    there = rigl(weight.cuda(), gradient.cuda(), mask.cuda(), 0.3)
    assert torch.equal(there.cpu(), rigl(weight, gradient, mask, 0.3))
    assert torch.equal(prune(weight.cuda(), mask.cuda(), 0.1).cpu(), prune(weight, mask, 0.1))


def test_schedules() -> None:
    assert [drop_fraction_at(step, 8, 0.3) for step in (0, 4, 8, 9)] == pytest.approx([0.3, 0.15, 0, 0])
    assert drop_fraction_at(2, 8, 0.3) == pytest.approx(0.15 * (1 + math.sqrt(0.5)))
    assert [density_at(step, 8, 0.2) for step in (0, 4, 8, 9)] == pytest.approx([1, 0.3, 0.2, 0.2])
    assert density_at(2, 8, 0.2) == pytest.approx(0.2 + 0.8 * 27 / 64)
    assert density_at(8, 8, 1 / 3) == 1 / 3
