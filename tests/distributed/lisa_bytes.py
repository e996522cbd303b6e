"""What LISA sends and holds by PaRO's formulas, with what is trained now in place of all, on two groups of two.

Worked out from the sizes of parameters and the layout's rule: in the flat buffer of a unit each parameter starts at a
multiple of 8 elements, and the buffer divides into as many such blocks as there are ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_paro.algorithms.sampling import Draw
from tests.distributed.lisa import WIDTH, Net
from tests.distributed.loops import Block
from tests.distributed.pool import WORLD_SIZE

GROUPS, SIZE = 2, 2
INNER = (170, 95, 110, 400, 230)
PERIODS = [(0, 1), (2, 3), (4, 0), (1, 2), (3, 4)]
INTERVAL, MICRO_BATCHES = 2, 2
STEPS = len(PERIODS) * INTERVAL
RUNGS = "nig"
PARTS = {"n": 1, "i": SIZE, "g": WORLD_SIZE}


def by_period(ask: Draw) -> Sequence[int]:
    return PERIODS[ask.period % len(PERIODS)]  # who fetches state ahead asks for one more


class Uneven(Net):
    """Layers of different sizes, none of which divides by anything, and parameters smaller than a shard's alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, inner) for inner in INNER)


class Unit:
    """Parameters that lie together."""

    def __init__(self, sizes: list[int], number: int | None) -> None:
        self.number = number
        """Of the layer; None for what is always trained."""
        self.spans: list[tuple[int, int]] = []
        end = 0
        for size in sizes:
            self.spans.append((end, end + size))
            end += -(-size // 8) * 8
        self.padded = -(-end // (8 * WORLD_SIZE)) * 8 * WORLD_SIZE

    def owned(self, rank: int, rung: str) -> int:
        """Elements of parameters in the slice of a rank, without padding."""
        group, member = divmod(rank, SIZE)
        part = {"n": 0, "i": member, "g": member * GROUPS + group}[rung]
        length = self.padded // PARTS[rung]
        low, high = part * length, (part + 1) * length
        return sum(max(0, min(stop, high) - max(start, low)) for start, stop in self.spans)


def units() -> list[Unit]:
    model = Uneven()
    layers = [Unit([p.numel() for p in layer.parameters()], number) for number, layer in enumerate(model.layers)]
    ends = [*model.embedding.parameters(), *model.norm.parameters(), *model.head.parameters()]
    return [Unit([p.numel() for p in ends], None), *layers]


def legs(one: str, other: str) -> set[str]:
    """Where values go between two rungs: N to I inside the group, I to G between groups."""
    low, high = sorted(map(RUNGS.index, (one, other)))
    return set(("inside", "between")[low:high])


def sent(
    partition: str, active: Sequence[int], width: int = 4, is_first: bool = False, lowest: int = 0, before: int = 0
) -> tuple[int, int]:
    """Bytes a rank sends in a step, inside its group and between groups (PaRO, section 6): gathers of everything, and
    gradients and updates of what is trained.

    Two gathers of a layer a micro-batch, one of what is whole all the time; the last layer is kept at the turn to
    backward once a micro-batch has shown that it is the last. A backward goes down to the lowest layer that is trained,
    or to the embeddings; layers that the step before went down to were gathered ahead once more, in vain.

    Args:
        partition: Its letters.
        active: The layers that are trained.
        width: Bytes of an element.
        is_first: Whether no step was before this one.
        lowest: The layer that the backward goes down to.
        before: The same of the step before.
    """
    p, g, os = partition
    total = {"inside": 0, "between": 0}

    def add(where: set[str], elements: int, times: int = 1) -> None:
        for leg in where:
            share = elements * width if leg == "inside" else elements * width // SIZE
            of = SIZE if leg == "inside" else GROUPS
            total[leg] += times * share * (of - 1) // of

    for unit in units():
        gathers = MICRO_BATCHES * (1 if unit.number is None else 2)
        if unit.number == len(INNER) - 1:
            gathers -= MICRO_BATCHES - is_first
        elif unit.number is not None and unit.number < lowest:
            gathers -= MICRO_BATCHES - (unit.number >= before)
        add(legs(p, "n"), unit.padded, gathers)
        if unit.number is None or unit.number in active:
            add(legs("n", g), unit.padded, MICRO_BATCHES)
            add(legs(g, "g"), unit.padded)
            add(legs("g", os), unit.padded)
            add(legs(os, p), unit.padded)
    return total["inside"], total["between"]


def held(
    partition: str, rank: int, active: Sequence[int], stateful: set[int], width: int, keep_master: bool
) -> dict[str, int]:
    """Bytes of a rank after a step whose gradients were cleared (PaRO, section 5, with Ψ' for what is trained).

    Args:
        partition: Its letters.
        rank: Which.
        active: The layers that are trained.
        stateful: The layers that have optimizer state.
        width: Bytes of a parameter that computes; 2 with masters of 4.
        keep_master: Whether sleeping layers have masters as well.
    """
    p, _, os = partition
    total = {"parameters": 0, "gradients": 0, "master": 0, "optimizer": 0}
    for unit in units():
        mastered = width == 2 and (unit.number is None or unit.number in active or keep_master)
        if mastered:
            total["master"] += 4 * unit.padded // PARTS[os]
        if not (mastered and p == os != "n"):  # there masters are cast when they are gathered
            total["parameters"] += width * unit.padded // PARTS[p]
        if unit.number is None or unit.number in stateful:
            total["optimizer"] += 2 * 4 * unit.owned(rank, os)
    return total


def gradients(rung: str, active: Sequence[int]) -> int:
    """Bytes of fp32 gradients at a rung."""
    return sum(4 * unit.padded // PARTS[rung] for unit in units() if unit.number is None or unit.number in active)
