"""Masks keep what was asked, each weight as likely as another, and depend on seed and name only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_paro.algorithms.supar.masks import Masks, check_mask, densities, draw_mask, generator_of, load_masks

SHAPE = (48, 64)


def drawn(
    density: float = 0.25, name: str = "w", shape: tuple[int, ...] = SHAPE, axis: int = 1, **how: Any
) -> torch.Tensor:
    return draw_mask(Masks(**{"density": density, **how}), name, shape, axis, density)


@pytest.mark.parametrize("density", [1 / 64, 0.1, 0.25, 0.5, 0.999])
@pytest.mark.parametrize("shape", [SHAPE, (7, 13), (3, 5, 2), (1200, 1500)])
def test_random_keeps_exactly_what_was_asked(shape: tuple[int, ...], density: float) -> None:
    """Also of so many that two draws are equal."""
    mask = drawn(density, shape=shape)
    assert mask.shape == shape
    assert mask.dtype is torch.bool
    assert int(mask.sum()) == round(density * math.prod(shape))


def test_equal_draws_at_the_border_are_told_apart() -> None:
    count = 2**22
    values = torch.rand(count, generator=generator_of(0, "many"))
    kept = next(k for k in range(count // 2, count) if values.kthvalue(k).values == values.kthvalue(k + 1).values)
    mask = draw_mask(Masks(density=kept / count), "many", (count, 1), 1, kept / count)
    assert int(mask.sum()) == kept


def test_seed_and_name_are_all_it_depends_on() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = drawn()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    drawn(name="another")
    assert torch.equal(first, drawn())
    assert not torch.equal(first, drawn(name="another"))
    assert not torch.equal(first, drawn(seed=1))


@pytest.mark.parametrize(
    "how", [{}, {"kind": "bernoulli"}, {"kind": "nm", "n": 1}, {"kind": "block", "block": 8}], ids=str
)
def test_every_weight_is_as_likely(how: dict[str, Any]) -> None:
    """Within five standard deviations, over 400 seeds, also row by row."""
    counts = sum(drawn(seed=seed, **how).double() for seed in range(400))
    assert isinstance(counts, torch.Tensor)
    deviation = math.sqrt(400 * 0.25 * 0.75)
    assert (counts - 100).abs().max() < 5 * deviation


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"density": 1.0},
        {"kind": "bernoulli"},
        {"kind": "nm", "n": 1},
        {"kind": "block", "block": 8},
        {"kind": "er"},
    ],
    ids=str,
)
def test_the_default_device_is_of_no_account(how: dict[str, Any]) -> None:
    with torch.device("meta"):
        mask = drawn(**how)
    assert torch.equal(mask, drawn(**how))


def test_bernoulli_counts_vary() -> None:
    counts = torch.tensor([float(drawn(kind="bernoulli", seed=seed).sum()) for seed in range(200)])
    n = math.prod(SHAPE)
    assert counts.mean() == pytest.approx(n / 4, abs=4 * math.sqrt(n * 3 / 16 / 200))
    assert counts.std() == pytest.approx(math.sqrt(n * 3 / 16), rel=0.2)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
@pytest.mark.parametrize("axis", [0, 1])
def test_n_of_m_along_the_fan_in(n: int, m: int, axis: int) -> None:
    mask = drawn(n / m, kind="nm", n=n, m=m, axis=axis)
    groups = (mask.t() if axis == 0 else mask).reshape(-1, m)
    assert (groups.sum(1) == n).all()
    assert len({tuple(row) for row in groups.tolist()}) == math.comb(m, n)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_are_whole(axis: int) -> None:
    mask = drawn(0.25, kind="block", block=8, axis=axis)
    squares = mask.view(6, 8, 8, 8).permute(0, 2, 1, 3).flatten(2).sum(2)
    assert set(squares.flatten().tolist()) == {0, 64}
    assert int(mask.sum()) == SHAPE[0] * SHAPE[1] // 4


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"kind": "nm", "m": 5, "density": 1.0}, "does not divide by m=5"),
        ({"kind": "block", "block": 7}, "do not divide by block=7"),
    ],
)
def test_shapes_that_do_not_divide(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drawn(**how)


def test_erdos_renyi_keeps_the_whole_and_gives_every_output_as_many() -> None:
    shapes = {"small": (8, 8), "wide": (256, 64), "large": (512, 512)}
    found = densities(Masks("er", 0.1), shapes)
    sizes = {name: a * b for name, (a, b) in shapes.items()}
    assert sum(found[name] * sizes[name] for name in shapes) == pytest.approx(0.1 * sum(sizes.values()))
    assert found["wide"] / found["large"] == pytest.approx((320 / 256 / 64) / (1024 / 512 / 512))
    assert found["small"] == 1.0  # it would be more
    assert densities(Masks("er", 1.0), shapes) == dict.fromkeys(shapes, 1.0)


def test_from_a_file(tmp_path: Path) -> None:
    masks = {"a": drawn(), "b": drawn(name="b")}
    torch.save(masks, tmp_path / "masks.pt")
    loaded = load_masks(tmp_path / "masks.pt")
    assert all(torch.equal(loaded[name], mask) for name, mask in masks.items())
    torch.save({"a": masks["a"].float()}, tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match="'a' in .* is no bool tensor"):
        load_masks(tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match="there is no file"):
        load_masks(tmp_path / "none.pt")


def test_masks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="has shape .48, 64., the parameter .64, 48."):
        check_mask("w", drawn(), (64, 48))
    with pytest.raises(ValueError, match="keeps none of its 3072 weights"):
        check_mask("w", torch.zeros(SHAPE, dtype=torch.bool), SHAPE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "magic"}, "kind='magic' is not one of random"),
        ({"density": 0}, "density=0 must be above 0 and at most 1"),
        ({"density": 1.5}, "density=1.5 must be above 0"),
        ({"density": True}, "density=True must be"),
        ({"density": "half"}, "density='half' must be"),
        ({"density": math.nan}, "density=nan must be"),
        ({"kind": "nm", "n": 5}, "n=5, m=4: expected 0 < n <= m"),
        ({"kind": "block", "block": 0}, "block=0 must be at least 1"),
        ({"kind": "file"}, "kind='file' and path=None: a path goes with"),
        ({"path": "x"}, "kind='random' and path='x'"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Masks(**arguments)


def test_a_density_beside_n_and_m_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps 2 of 4, a density of 0.5, but density=0.25. HINT: leave the density"):
        Masks("nm", 0.25)
    assert Masks("nm", 0.25, n=1).n == 1
    with pytest.raises(ValueError, match="seed=None must be a whole number"):
        Masks(seed=None)  # type: ignore[arg-type]


def test_whole_numbers_are_densities_too() -> None:
    assert repr(Masks(density=1)) == repr(Masks(density=1.0))
