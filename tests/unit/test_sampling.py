"""Which layers are drawn: how often, independently of what, and what a sampler of one's own may return."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightning_paro.algorithms.sampling import FLOOR, Draw, Sampler, cyclic, draw, scored, uniform

BUILT_IN = ["uniform", "cyclic", "weight_norm", "grad_norm"]
SIZES = [(1, 1), (2, 1), (5, 2), (7, 3), (8, 8), (12, 5), (12, 8), (9, 7), (24, 2), (32, 31)]


def draws(sampler: str, size: int, num_layers: int, seeds: Iterable[int], period: int = 0) -> list[tuple[int, ...]]:
    scores = [1.0] * size
    return [draw(sampler, Draw(period, size, num_layers, seed), scores) for seed in seeds]


def chi_square(counts: Sequence[int], expected: Sequence[float]) -> float:
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


def bound(freedom: int) -> float:
    """What chi-square stays below in 999 of 1000 cases (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# ---- what holds of every sampler ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", BUILT_IN)
def test_as_many_different_layers_as_asked_in_ascending_order(sampler: str) -> None:
    dice = random.Random(1)
    for _ in range(200):
        size = dice.randint(1, 40)
        ask = Draw(dice.randint(0, 10**6), size, dice.randint(0, size), dice.randint(-(10**12), 10**12))
        scores = [dice.choice([0.0, dice.random(), 1e300, math.inf, math.nan, -1.0]) for _ in range(size)]
        drawn = draw(sampler, ask, scores)
        assert list(drawn) == sorted(set(drawn))
        assert len(drawn) == ask.num_layers
        assert set(drawn) <= set(range(size))
        assert draw(sampler, ask, scores) == drawn
        assert all(type(index) is int for index in drawn)


@pytest.mark.parametrize("sampler", BUILT_IN)
@pytest.mark.parametrize("size", [1, 6])
def test_none_and_all(sampler: str, size: int) -> None:
    assert draws(sampler, size, 0, range(3)) == [()] * 3
    assert draws(sampler, size, size, range(3), period=5) == [tuple(range(size))] * 3


@pytest.mark.parametrize("sampler", BUILT_IN)
def test_the_same_whatever_happens_to_other_generators(sampler: str) -> None:
    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    expected = draws(sampler, 24, 4, range(20))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    torch.rand(7)
    before = states()
    with torch.device("meta"):
        assert draws(sampler, 24, 4, range(20)) == expected
    assert states() == before
    assert Draw(0, 24, 4, 1).generator().initial_seed() not in (3, torch.initial_seed())


@pytest.mark.parametrize("sampler", BUILT_IN)
def test_seeds_and_periods_have_draws_of_their_own(sampler: str) -> None:
    """Of C(24, 4) = 10626 subsets, 300 draws repeat about four; a draw that ignores its seed repeats one."""
    assert len(set(draws(sampler, 24, 4, range(300)))) > 280
    assert len({draw(sampler, Draw(period, 24, 4, 7), [1.0] * 24) for period in range(300)}) > 280
    shifted = [draw(sampler, Draw(period + 1, 24, 4, 6), [1.0] * 24) for period in range(300)]
    same = [draw(sampler, Draw(period, 24, 4, 7), [1.0] * 24) for period in range(300)]
    assert sum(a == b for a, b in zip(shifted, same, strict=True)) < 5


def test_known_draws() -> None:
    """These are in users' checkpoints and curves: a change of them is a break."""
    assert [draw("uniform", Draw(period, 32, 2, 0)) for period in range(4)] == [(5, 6), (23, 28), (4, 6), (10, 26)]
    assert [draw("cyclic", Draw(period, 5, 2, 0)) for period in range(4)] == [(2, 3), (0, 4), (1, 2), (1, 4)]
    assert [draw("grad_norm", Draw(period, 8, 2, 0), range(8)) for period in range(3)] == [(3, 6), (1, 3), (6, 7)]


# ---- uniform ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "by"), [("uniform", "seed"), ("uniform", "period"), ("cyclic", "seed"), ("grad_norm", "period")]
)
def test_all_subsets_are_equally_likely(sampler: str, by: str) -> None:
    count = 4000
    asks = [Draw(0, 5, 2, i) if by == "seed" else Draw(i, 5, 2, 11) for i in range(count)]
    seen = Counter(draw(sampler, ask, [1.0] * 5) for ask in asks)
    subsets = list(itertools.combinations(range(5), 2))
    assert chi_square([seen[subset] for subset in subsets], [count / 10] * 10) < bound(9)


def test_one_period_says_nothing_about_the_next() -> None:
    pairs = Counter((draw("uniform", Draw(i, 4, 1, 5)), draw("uniform", Draw(i + 1, 4, 1, 5))) for i in range(3200))
    assert chi_square([pairs[(a,), (b,)] for a in range(4) for b in range(4)], [200] * 16) < bound(15)


def test_the_mean_wait_until_all_were_drawn() -> None:
    """Of the coupon collector who takes one at a time: n (1 + 1/2 + ... + 1/n)."""
    waits = []
    for seed in range(400):
        missing, period = set(range(6)), 0
        while missing:
            missing -= set(uniform(Draw(period, 6, 1, seed)))
            period += 1
        waits.append(period)
    mean, variance = 6 * sum(1 / i for i in range(1, 7)), sum((6 / i) ** 2 - 6 / i for i in range(1, 7))
    assert abs(sum(waits) / len(waits) - mean) < 3 * math.sqrt(variance / len(waits))


# ---- cyclic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "num_layers"), SIZES)
def test_cyclic_for_a_thousand_periods(size: int, num_layers: int) -> None:
    counts, picks = [0] * size, []
    for period in range(1000):
        chosen = cyclic(Draw(period, size, num_layers, 9))
        assert len(set(chosen)) == len(chosen) == num_layers
        for index in chosen:
            counts[index] += 1
            assert max(counts) - min(counts) <= 1  # also in the middle of a period
        picks += chosen
    for begin in range(0, len(picks) - size + 1, size):
        assert sorted(picks[begin : begin + size]) == list(range(size))


def test_cyclic_takes_every_permutation_and_a_new_one_each_time() -> None:
    seen = Counter(tuple(cyclic(Draw(period, 3, 1, 4))[0] for period in range(3 * i, 3 * i + 3)) for i in range(1200))
    assert chi_square([seen[order] for order in itertools.permutations(range(3))], [200] * 6) < bound(5)


def test_cyclic_begins_anew_at_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late period takes no more permutations than the first that ends where a permutation does."""
    asked = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **options: asked.append(args) or randperm(*args, **options))
    for size, num_layers in SIZES:
        for period in (0, 999, 10_000, 10**9):
            asked.clear()
            cyclic(Draw(period, size, num_layers, 0))
            assert 1 <= len(asked) <= num_layers + 1


@pytest.mark.parametrize(("size", "num_layers"), SIZES)
def test_cyclic_late_is_what_it_would_be_from_the_beginning(size: int, num_layers: int) -> None:
    """The sequence that its docstring describes, built from period 0 on."""
    picks: list[int] = []
    for cycle in range(60 * num_layers // size + 2):
        order = torch.randperm(size, generator=Draw(0, size, num_layers, 2).generator(cycle)).tolist()
        begun = picks[len(picks) - len(picks) % num_layers :]
        now = [index for index in order if index not in begun][: -len(begun) % num_layers]
        picks += now + [index for index in order if index not in now]
    for period in range(60):
        expected = picks[period * num_layers : (period + 1) * num_layers]
        assert cyclic(Draw(period, size, num_layers, 2)) == expected


# ---- by scores ----------------------------------------------------------------------------------------------


def chances(scores: Sequence[float]) -> list[float]:
    usable = [score if 0 < score < math.inf else 0.0 for score in scores]
    total = sum(usable)
    shares = [score / total if total else 1 / len(scores) for score in usable]
    return [(1 - FLOOR) * share + FLOOR / len(scores) for share in shares]


@pytest.mark.parametrize(
    "scores",
    [
        [1.0, 2.0, 3.0, 4.0],
        [0.0, 0.0, 5.0, 5.0],
        [1e-30, 3e-30, 0.0, 0.0],
        [math.nan, 1.0, 1.0, 2.0],
        [math.inf, 1.0, 3.0, -math.inf],
        [-1.0, 2.0, -2.0, 2.0],
        [0.0, 0.0, 0.0, 0.0],
        [math.nan] * 4,
    ],
)
def test_the_first_is_drawn_in_proportion_to_scores(scores: list[float]) -> None:
    count = 4000
    first = Counter(scored(Draw(0, 4, 2, seed), scores)[0] for seed in range(count))
    assert chi_square([first[i] for i in range(4)], [count * chance for chance in chances(scores)]) < bound(3)


def test_the_second_is_drawn_in_proportion_among_the_rest() -> None:
    scores, count = [1.0, 2.0, 5.0], 6000
    p = chances(scores)
    pairs = Counter(tuple(scored(Draw(3, 3, 2, seed), scores)) for seed in range(count))
    orders = list(itertools.permutations(range(3), 2))
    expected = [count * p[a] * p[b] / (1 - p[a]) for a, b in orders]
    assert chi_square([pairs[order] for order in orders], expected) < bound(5)


def test_no_layer_is_left_out_for_good() -> None:
    drawn = Counter(scored(Draw(period, 10, 1, 0), [1.0] + [0.0] * 9)[0] for period in range(3000))
    assert set(drawn) == set(range(10))
    assert abs(drawn[0] / 3000 - (1 - FLOOR * 9 / 10)) < 0.02


def test_scores_may_be_as_large_or_small_as_floats_are() -> None:
    for factor in (sys.float_info.max / 4, sys.float_info.min * sys.float_info.epsilon):
        scores = [factor * weight for weight in (1, 2, 3, 4)]
        for seed in range(50):
            assert scored(Draw(0, 4, 4, seed), scores) == scored(Draw(0, 4, 4, seed), [1, 2, 3, 4])


# ---- a sampler of one's own ---------------------------------------------------------------------------------


def test_a_sampler_is_asked_and_may_draw_from_the_generator_it_is_given() -> None:
    asked = []

    def own(ask: Draw) -> list[int]:
        asked.append(ask)
        return torch.randperm(ask.size, generator=ask.generator()).tolist()[: ask.num_layers]

    assert draw(own, Draw(3, 9, 4, 5)) == draw("uniform", Draw(3, 9, 4, 5))
    assert asked == [Draw(3, 9, 4, 5)]


@pytest.mark.parametrize(
    "own",
    [
        lambda ask: [4, 0],
        lambda ask: (0, 4),
        lambda ask: {4, 0},
        lambda ask: iter([4, 0]),
        lambda ask: torch.tensor([4, 0]),
        lambda ask: np.array([4, 0]),
        lambda ask: range(0, 5, 4),
    ],
)
def test_whatever_holds_whole_numbers_will_do(own: Sampler) -> None:
    assert draw(own, Draw(0, 5, 2, 0)) == (0, 4)


@pytest.mark.parametrize(
    "returned",
    [[], [1], [1, 1], [0, 1, 2], [0, 5], [-1, 0], [0.0, 1.0], [0.5, 1], ["0", "1"], "01", None, 2, [True, False]],
    ids=repr,
)
def test_what_a_sampler_returns_is_checked(returned: object) -> None:
    with pytest.raises(ValueError, match="in period 7; expected 2 different numbers from 0 to 4. HINT: ") as error:
        draw(lambda ask: returned, Draw(7, 5, 2, 0))
    assert f"the sampler returned {returned!r} in" in str(error.value)


def test_what_does_not_end_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"returned \[0, 1, 0\] in period 0; expected 2 different"):
        draw(lambda ask: itertools.cycle([0, 1]), Draw(0, 5, 2, 0))
    with pytest.raises(ValueError, match="returned 1 in period 0; expected 1 different"):
        draw(lambda ask: torch.tensor(1), Draw(0, 5, 1, 0))  # type: ignore[arg-type, return-value]


def test_a_samplers_own_error_is_not_lost() -> None:
    def failing(ask: Draw) -> Any:
        yield 0
        raise TypeError("my own")

    with pytest.raises(TypeError, match="my own"):
        draw(failing, Draw(0, 5, 2, 0))


def test_nothing_is_a_list_as_well() -> None:
    assert draw(lambda ask: [], Draw(0, 5, 0, 0)) == ()
    with pytest.raises(ValueError, match="returned None .* expected 0 different"):
        draw(lambda ask: None, Draw(0, 5, 0, 0))


def test_what_goes_wrong_in_a_sampler_is_not_hidden() -> None:
    def own(ask: Draw) -> list[int]:
        raise TypeError("of the sampler's")

    with pytest.raises(TypeError, match="of the sampler's"):
        draw(own, Draw(0, 5, 2, 0))
