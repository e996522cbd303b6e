"""Which layers are trained in a period: drawn without replacement, from a seed and the period's number alone."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FLOOR", "SCORED", "Draw", "Sampler", "cyclic", "draw", "scored", "uniform"]

FLOOR = 0.1
"""Of a draw by scores, the part that is uniform: no layer is left out for good."""

SCORED = ("weight_norm", "grad_norm")
"""Samplers that weigh layers by what they measured."""


@dataclass(frozen=True)
class Draw:
    """What a sampler is asked.

    Attributes:
        period: Number of the period, from 0.
        size: How many layers there are.
        num_layers: How many of them are to be drawn.
        seed: The seed of the run.
    """

    period: int
    size: int
    num_layers: int
    seed: int

    def generator(self, period: int | None = None) -> torch.Generator:
        """A generator of this seed and period, or of another one, on the host."""
        text = f"{self.seed}/{self.period if period is None else period}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


Sampler = Callable[[Draw], Sequence[int]]


def uniform(ask: Draw) -> list[int]:
    """All subsets are equally likely (LISA, algorithm 1)."""
    return _permutation(ask.size, ask.generator())[: ask.num_layers]


def cyclic(ask: Draw) -> list[int]:
    """One permutation of all layers after the other: at any time their numbers of periods differ by one at most.

    A period that takes the end of one permutation and the beginning of the next never takes a layer twice: the next one
    is shuffled such that what was just taken comes later.
    """
    if not ask.num_layers:
        return []
    first, last = ask.period * ask.num_layers, (ask.period + 1) * ask.num_layers
    alone = first - first % math.lcm(ask.size, ask.num_layers)  # a permutation begins with a period: none was begun
    taken: list[int] = []
    for cycle in range(alone // ask.size, math.ceil(last / ask.size)):
        order = _permutation(ask.size, ask.generator(cycle))
        begun = len(taken) % ask.num_layers  # of the period in which the last permutation ended
        just = set(taken[len(taken) - begun :])
        free = [index for index in order if index not in just]
        missing = (ask.num_layers - begun) % ask.num_layers
        head, tail = free[:missing], set(free[missing:]) | just
        taken += head + [index for index in order if index in tail]
    return taken[first - alone : last - alone]


def scored(ask: Draw, scores: Sequence[float]) -> list[int]:
    """Without replacement, with probabilities in proportion to scores, of which :data:`FLOOR` is uniform.

    A score that is no positive finite number counts as zero; if all do, the draw is uniform. The draw is the largest of
    log p plus Gumbel noise, which is that of one after the other.
    """
    weights = torch.tensor(scores, dtype=torch.float64, device="cpu").nan_to_num(0, 0, 0).clamp_(min=0)
    weights = weights / weights.max() if weights.any() else torch.ones_like(weights)
    chance = (1 - FLOOR) * weights / weights.sum() + FLOOR / ask.size
    noise = torch.rand(ask.size, dtype=torch.float64, device="cpu", generator=ask.generator())
    gumbel = -noise.clamp_(1e-300).log_().neg_().log_()
    return (chance.log() + gumbel).topk(ask.num_layers).indices.tolist()


def _permutation(size: int, generator: torch.Generator) -> list[int]:
    """On the host, whatever the default device."""
    order: list[int] = torch.randperm(size, generator=generator, device="cpu").tolist()
    return order


def _listed(answer: object, count: int) -> Any:
    """What a sampler answers, as a list if it is an iterable, of which one more than asked for is read."""
    answer = answer.tolist() if isinstance(answer, torch.Tensor) else answer
    if isinstance(answer, Iterable) and not isinstance(answer, (str, bytes, Mapping)):
        return list(itertools.islice(answer, count + 1))
    return answer


def draw(sampler: str | Sampler, ask: Draw, scores: Sequence[float] = ()) -> tuple[int, ...]:
    """The layers of a period, in ascending order.

    Raises:
        ValueError: If a sampler of the user's own does not return that many different layers.
    """
    chosen: Any
    if sampler in SCORED:
        chosen = scored(ask, scores)
    elif sampler == "uniform":
        chosen = uniform(ask)
    elif sampler == "cyclic":
        chosen = cyclic(ask)
    else:
        assert callable(sampler)
        chosen = _listed(sampler(ask), ask.num_layers)
    try:
        numbers = sorted(operator.index(index) for index in chosen)
        is_wrong = any(isinstance(index, bool) for index in chosen)
    except TypeError:
        numbers, is_wrong = [], True
    distinct = set(numbers)
    is_wrong = is_wrong or not distinct <= set(range(ask.size))
    if is_wrong or len(distinct) != len(numbers) or len(numbers) != ask.num_layers:
        raise ValueError(
            f"the sampler returned {chosen!r} in period {ask.period}; expected {ask.num_layers} different numbers from "
            f"0 to {ask.size - 1}. HINT: a sampler is called with a Draw and returns layers' numbers."
        )
    return tuple(numbers)
