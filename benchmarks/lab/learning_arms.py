"""Who learns, and by which protocol: fixed before any of it was run.

1. A small model is pre-trained on text A, once. Every run starts there and learns text B. A seed decides what is drawn
   from B, how adapters are initialised, and which layers are sampled; with the same seed all see the same batches.
2. Every *main arm* runs with seed 0 at each rate of one grid, the same for all of them. Its rate is the one of the
   lowest held-out loss at the end. If that is an end of the grid, the table says so; the grid is not extended.
3. At that rate a main arm runs with the other seeds. Reported are the mean and the range of all its seeds.
4. *Ablations* change one thing of the base arm (LISA, the first of the main arms of its kind), at the base arm's rate,
   with all seeds.

Same for all: AdamW, betas 0.9 and 0.999, decay 0.01, clipping at 1, a tenth of the steps of linear warm-up, then a
linear decay to zero that goes on across the periods of LISA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["STUDIES", "Arm", "Row", "Run", "Study", "arm_of", "final", "rate_of", "remaining"]

Row = Mapping[str, Any]
NEVER = 10**6
"""An interval that does not end."""


@dataclass(frozen=True)
class Arm:
    """A way to fine-tune.

    Attributes:
        method: ``"full"``, ``"lora"`` (on all linear layers of the blocks, alpha twice the rank) or ``"lisa"``.
        rank: Of LoRA.
        layers: LISA's γ.
        interval: LISA's K, in optimizer steps.
        policy: What LISA does with optimizer state.
        sampler: How LISA draws layers.
    """

    method: str
    rank: int = 0
    layers: int = 0
    interval: int = 0
    policy: str = ""
    sampler: str = ""

    @property
    def name(self) -> str:
        """As it stands in tables."""
        if self.method != "lisa":
            return "full" if self.method == "full" else f"LoRA r={self.rank}"
        interval = "never" if self.interval == NEVER else str(self.interval)
        changed = [what for what in (self.policy, self.sampler) if what not in ("drop_frozen", "uniform")]
        return ", ".join([f"LISA γ={self.layers} K={interval}", *changed])


@dataclass(frozen=True)
class Run:
    """One fine-tuning."""

    arm: Arm
    lr: float
    seed: int

    def row(self) -> dict[str, Any]:
        """What identifies it in a row."""
        return {"arm": asdict(self.arm), "lr": self.lr, "seed": self.seed}


@dataclass(frozen=True)
class Study:
    """One shape of model, and all that is run with it.

    Attributes:
        length: Bytes of a sequence.
        pretraining: Steps and sequences a step on text A.
        tuning: The same on text B.
        held_out: Windows of text B whose mean loss is reported.
        every: Steps from one evaluation to the next.
        rates: The grid of peak learning rates.
        main: The arms whose rate is chosen from it.
        ablations: Arms that run at the rate of the base arm, by what they vary.
        seeds: Of all of these.
    """

    length: int
    pretraining: tuple[int, int]
    tuning: tuple[int, int]
    held_out: int
    every: int
    rates: tuple[float, ...]
    main: tuple[Arm, ...]
    ablations: Mapping[str, tuple[Arm, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def base(self) -> Arm:
        """What ablations change one thing of."""
        return next(arm for arm in self.main if arm.method == "lisa")


FULL = Arm("full")
LISA = Arm("lisa", layers=2, interval=10, policy="drop_frozen", sampler="uniform")

STUDIES = {
    "small": Study(
        length=128, pretraining=(300, 8), tuning=(200, 2), held_out=64, every=50, rates=(3e-4, 1e-3, 3e-3, 1e-2),
        main=(FULL, Arm("lora", rank=8), Arm("lora", rank=64), LISA),
        ablations={
            "γ": tuple(replace(LISA, layers=layers) for layers in (0, 1, 4, 8)),
            "K": tuple(replace(LISA, interval=interval) for interval in (1, 3, 50, NEVER)),
            "state_policy": tuple(replace(LISA, policy=policy) for policy in ("reset_all", "offload", "keep")),
            "sampler": tuple(replace(LISA, sampler=sampler) for sampler in ("cyclic", "weight_norm", "grad_norm")),
        },
    ),
    "gpt2-small": Study(
        length=256, pretraining=(300, 16), tuning=(300, 8), held_out=256, every=50, rates=(1e-4, 3e-4, 1e-3),
        main=(FULL, Arm("lora", rank=128), replace(LISA, interval=20), replace(LISA, interval=3)),
    ),
}  # fmt: skip
"""By the shape of the model."""


def arm_of(row: Row) -> Arm:
    """Whose row it is."""
    return Arm(**row["arm"])


def final(row: Row) -> float:
    """Held-out loss at the end, in nats a byte; infinite if it diverged."""
    loss = float(row["held_out"][-1][1])
    return loss if math.isfinite(loss) else math.inf


def rate_of(study: Study, arm: Arm, rows: Iterable[Row]) -> float | None:
    """The rate that the protocol gives an arm, or None if not all of the grid has been run."""
    if arm not in study.main:
        arm = study.base
    losses = {row["lr"]: final(row) for row in rows if arm_of(row) == arm and row["seed"] == study.seeds[0]}
    if not set(study.rates) <= losses.keys():
        return None
    return min(study.rates, key=lambda lr: losses[lr])


def remaining(study: Study, rows: Iterable[Row]) -> Iterator[Run]:
    """What can be run next and has no row yet: first the grid, and when that is done, what goes by its choice."""
    rows = list(rows)
    done = {Run(arm_of(row), row["lr"], row["seed"]) for row in rows}
    grid = [Run(arm, lr, study.seeds[0]) for arm in study.main for lr in study.rates]
    missing = [run for run in grid if run not in done]
    if missing:
        yield from missing
        return
    for arm in (*study.main, *(arm for arms in study.ablations.values() for arm in arms)):
        rate = rate_of(study, arm, rows)
        assert rate is not None
        yield from (run for seed in study.seeds if (run := Run(arm, rate, seed)) not in done)
