"""What is trained to see whether hyperparameters carry over, and how it is judged: fixed before any of it was run.

1. A study trains every arm at every learning rate of its grid, of its shapes (width and density), with every seed. The
   seed decides initial values, masks and nothing else: all runs of a study see the same batches. Seeds were used for
   nothing before.
2. A run's loss is its mean training loss over the last tenth of its steps; no byte is seen twice, so nothing is held
   out. It is infinite if the training diverged.
3. The optimum of a shape is the vertex of the parabola through the lowest loss and its neighbours, in log2 of the rate.
   The *shift* is its distance to the dense model's, in octaves, for each seed by itself; reported are the mean and
   Student's 95 % interval over seeds. An optimum at an end of the grid is said to be one; grids are not extended.
   The *regret* is what the dense model's best rate costs: the mean loss there, less the lowest.
4. A parameterization *carries over* if all its shifts are at most one octave, a step of the grid.

Same for all: AdamW, betas 0.9 and 0.95, no weight decay, no clipping. At density 1 μP and SμPar are the same, and so
are what mixes them; these runs are made once, as μP's.

Arms: the three parameterizations, and two that have only one half of what SμPar adds to μP: ``"init"`` its initial
values with μP's rates, ``"lr"`` its rates with μP's initial values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from lightning_paro.experiments import Setting

__all__ = ["ARMS", "STUDIES", "SUBJECTS", "Run", "Study", "Subject", "octaves"]

ARMS = {"sp": "SP", "mup": "μP", "supar": "SμPar", "init": "SμPar's init, μP's rates", "lr": "μP's init, SμPar's rates"}
"""What an arm is called."""
MIXED = ("init", "lr")
LIKE_MUP = ("supar", *MIXED)
"""What is μP at density 1."""


@dataclass(frozen=True)
class Subject:
    """A family of models, and the hyperparameters that all of them are trained with.

    Attributes:
        model: A key of :data:`benchmarks.lab.supar_models.MODELS`.
        base: Width of the base model.
        lr: Base learning rate, where it is not swept.
        plan: Arguments of :meth:`SuParPlan.from_model`.
        sp_std: SP's standard deviation at init, if it is not that of the base model: a number, or ``"dense mup"``, that
            of μP's hidden weights at the same width and density 1.
    """

    model: str
    base: int
    lr: float
    plan: Mapping[str, float]
    sp_std: float | Literal["dense mup"] | None = None

    def std(self, arm: str, width: int) -> float:
        """Standard deviation at init of the base model."""
        own = self.plan["init_std"]
        if arm != "sp" or self.sp_std is None:
            return own
        return own / math.sqrt(width / self.base) if self.sp_std == "dense mup" else float(self.sp_std)


FIGURE_5 = {"init_std": 0.101, "alpha_input": 11.22, "alpha_output": 1.0}
TABLE_3 = {"init_std": 0.08665602, "alpha_input": 9.1705, "alpha_output": 1.0951835}

SUBJECTS = {
    "llama": Subject("llama", 64, 1.68e-2, FIGURE_5),
    "perceptron": Subject("perceptron", 64, 2**-7, {"init_std": 64**-0.5}),
    "gpt-heads-32": Subject("gpt-heads-32", 256, 1.68e-2, FIGURE_5),
    "window": Subject("window", 64, 2**-7, {"init_std": 64**-0.5}),
    "gpt": Subject("gpt", 256, 1.62e-2, TABLE_3, "dense mup"),
    "gpt-4-layers": Subject("gpt-4-layers", 256, 1.62e-2, TABLE_3, "dense mup"),
    "gpt-iso": Subject("gpt", 256, 1.62e-2, TABLE_3, 0.02),
}
"""Hyperparameters of the paper's figure 5 and table 3, tuned on another model of width 256; SP's as in its table 4."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        arm: A key of :data:`ARMS`.
        width: Of the model.
        density: Share of weights that are kept.
        seed: Of initial values and masks.
        lr: Base learning rate; of hidden weights only, if the study says so.
    """

    arm: str
    width: int
    density: float
    seed: int
    lr: float

    @property
    def setting(self) -> Setting:
        """As experiments know it: what mixes is SμPar there."""
        kind: Any = self.arm if self.arm in ("sp", "mup") else "supar"
        return Setting(kind, self.width, self.density, self.seed, self.lr)


def octaves(low: int, high: int) -> tuple[float, ...]:
    """Powers of two, both ends included."""
    return tuple(2.0**power for power in range(low, high + 1))


@dataclass(frozen=True)
class Study:
    """All that is run to answer one question.

    Attributes:
        subject: A key of :data:`SUBJECTS`.
        mode: Whether the learning rate of all tensors is swept, or that of hidden weights only.
        shapes: Widths with densities.
        rates: By arm.
        seeds: Of all of these.
        steps: Optimizer steps.
        batch: Sequences a step.
        length: Bytes of a sequence.
        decays: Whether rates rise over a tenth of the steps and fall linearly to a tenth; else they are constant.
    """

    subject: str
    mode: Literal["global", "hidden"]
    shapes: tuple[tuple[int, float], ...]
    rates: Mapping[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    steps: int
    batch: int
    length: int
    decays: bool

    def runs(self) -> Iterator[Run]:
        """Parameterizations before what mixes them, and seed by seed, so that what is cut off is whole for some."""
        mixed = [[arm for arm in self.rates if (arm in MIXED) == later] for later in (False, True)]
        for arms, seed in product(mixed, self.seeds):
            for arm, (width, density) in product(arms, self.shapes):
                if density < 1 or arm not in LIKE_MUP:
                    yield from (Run(arm, width, density, seed, lr) for lr in self.rates[arm])


DENSITIES = (1.0, 1 / 4, 1 / 16, 1 / 64)

STUDIES = {
    "hidden": Study(
        "window", "hidden", tuple((256, density) for density in DENSITIES),
        {"sp": octaves(-9, 1), "mup": octaves(-7, 3), "supar": octaves(-7, 3)},
        seeds=(11, 12, 13), steps=300, batch=16, length=64, decays=False,
    ),
    "hidden_low": Study(
        "window", "hidden", tuple((256, density) for density in DENSITIES),
        {"sp": octaves(-13, -3), "mup": octaves(-11, -1), "supar": octaves(-11, -1)},
        seeds=(21, 22, 23), steps=300, batch=16, length=64, decays=False,
    ),
    "global": Study(
        "gpt", "global", tuple((1024, density) for density in DENSITIES),
        {
            "sp": octaves(-14, -4), "mup": octaves(-11, -1), "supar": octaves(-11, -1),
            "init": octaves(-11, -1), "lr": octaves(-11, -1),
        },
        seeds=(11, 12, 13), steps=400, batch=16, length=256, decays=True,
    ),
    "iso": Study(
        "gpt-iso", "global", ((768, 1.0), (1088, 1 / 2), (1536, 1 / 4), (2176, 1 / 8)),
        {"sp": (2e-4, 6e-4), "mup": (1.62e-2,), "supar": (1.62e-2,)},
        seeds=(11, 12, 13), steps=450, batch=32, length=256, decays=True,
    ),
}  # fmt: skip
"""By the question: hidden rates of a perceptron on the CPU, whose first grid was too high, so there is a second one
with fresh seeds; the rate of a GPT on a GPU, also with half of SμPar each; and models of different width with equally
many weights at fixed hyperparameters, SP at both rates of the paper."""
