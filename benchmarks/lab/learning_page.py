"""The learning runs as tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.learning_arms import NEVER, STUDIES, Arm, Row, Study, arm_of, final, rate_of
from benchmarks.lab.pictures import figure
from benchmarks.lab.text import table

__all__ = ["LEARNING", "Summary", "draw_ablations", "draw_curves", "summaries", "tell_learning"]

Report = dict[str, Any]
MIB = 2**20


@dataclass(frozen=True)
class Summary:
    """The runs of an arm at its rate.

    Attributes:
        arm: Whose they are.
        lr: Its rate.
        rows: One a seed.
    """

    arm: Arm
    lr: float
    rows: tuple[Row, ...]

    @property
    def mean(self) -> float:
        """Mean held-out loss at the end, over seeds."""
        return sum(map(final, self.rows)) / len(self.rows)

    @property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest of it."""
        return min(map(final, self.rows)), max(map(final, self.rows))


def summaries(report: Report) -> list[Summary]:
    """One for each arm that was run as the protocol says, in its order."""
    study, rows = STUDIES[report["setup"]["shape"]], report["rows"]
    found = []
    for arm in (*study.main, *(arm for arms in study.ablations.values() for arm in arms)):
        rate = rate_of(study, arm, rows)
        mine = tuple(row for row in rows if arm_of(row) == arm and row["lr"] == rate)
        if rate is not None and mine:
            found.append(Summary(arm, rate, mine))
    return found


def tell_learning(report: Report, name: str) -> Iterator[str]:
    """Main arms, the choice of their rates, and ablations, with the range over seeds everywhere."""
    setup = report["setup"]
    study, all_arms = STUDIES[setup["shape"]], {summary.arm: summary for summary in summaries(report)}
    main = [all_arms[arm] for arm in study.main if arm in all_arms]
    yield from (f"### {setup['shape']}, {setup['device']}", "", _setup_line(report), "")
    yield from (*_losses([summary.arm.name for summary in main], "arm", main), "")
    yield from (f"![Held-out loss while text B is learnt](pictures/{_picture(name, 'curves')})", "")
    yield "Held-out loss at the end with seed 0, by rate, from which each rate was chosen (bold):"
    yield from ("", *_grid(study, report["rows"]), "")
    edges = [summary.arm.name for summary in main if summary.lr in (min(study.rates), max(study.rates))]
    if edges:
        yield from (f"At an end of the grid, so a better rate may lie outside: {', '.join(edges)}.", "")
    if not study.ablations:
        return
    base = all_arms[study.base]
    yield f"One thing of {base.arm.name} changed, at its rate of {base.lr:g}:"
    yield ""
    cells: list[tuple[str, Summary]] = []
    for what in study.ablations:
        cells += [(f"{what} = {value}", summary) for value, summary in _along(what, study, all_arms)]
    yield from (*_losses([title for title, _ in cells], "changed", [summary for _, summary in cells]), "")
    if setup["device"] == "cpu":
        yield from ("On the CPU `offload` has nowhere else to move state, so it holds what `keep` holds.", "")
    yield f"![Held-out loss against γ, K, policy and sampler](pictures/{_picture(name, 'ablations')})"


def _setup_line(report: Report) -> str:
    setup = report["setup"]
    (pre_steps, pre_size), (steps, size), length = setup["pretraining"], setup["tuning"], setup["length"]
    start = report["rows"][0]["held_out"][0][1]
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    return (
        f"{report['rows'][0]['parameters'] / 1e6:.2f} million parameters; {pre_steps} steps of {pre_size} × {length} "
        f"bytes on text A, then {steps} steps of {size} × {length} bytes on text B, which start at a held-out loss of "
        f"{start:.3f} nats a byte, the mean over {setup['held_out']} windows; {versions}."
    )


def _losses(names: list[str], title: str, rows: list[Summary]) -> list[str]:
    parts = ("weights", "gradients", "states")
    held = {part: [f"{summary.rows[0]['bytes'][part] / MIB:.2f}" for summary in rows] for part in parts}
    return table({
        title: names,
        "rate": [f"{summary.lr:g}" for summary in rows],
        "held-out loss, mean": [f"{summary.mean:.4f}" for summary in rows],
        f"range over {len(rows[0].rows)} seeds": ["{:.4f} to {:.4f}".format(*summary.range) for summary in rows],
        "trained at a time": [f"{s.rows[0]['trainable'] / s.rows[0]['parameters']:.1%}" for s in rows],
        **{f"{part}, MiB": sizes for part, sizes in held.items()},
    })  # fmt: skip


def _grid(study: Study, rows: list[Row]) -> list[str]:
    losses = {(arm_of(row), row["lr"]): final(row) for row in rows if row["seed"] == study.seeds[0]}
    cells: dict[str, list[str]] = {"arm": [arm.name for arm in study.main]}
    for lr in study.rates:
        told = [(f"{losses[arm, lr]:.4f}", rate_of(study, arm, rows) == lr) for arm in study.main]
        cells[f"{lr:g}"] = [f"**{loss}**" if chosen else loss for loss, chosen in told]
    return table(cells)


def _along(what: str, study: Study, found: dict[Arm, Summary]) -> list[tuple[str, Summary]]:
    """An ablation, with the base arm in its place."""
    attribute = {"γ": "layers", "K": "interval", "state_policy": "policy", "sampler": "sampler"}[what]
    arms = [study.base, *study.ablations[what]]
    if what in ("γ", "K"):
        arms.sort(key=lambda arm: int(getattr(arm, attribute)))
    values = {arm: getattr(arm, attribute) for arm in arms}
    return [("never" if values[arm] == NEVER else str(values[arm]), found[arm]) for arm in arms if arm in found]


def _picture(name: str, what: str) -> str:
    return f"{name.replace('_', '-')}-{what}.png"


def draw_curves(report: Report, path: Path) -> None:
    """Held-out loss of the main arms against steps: the mean over seeds, and their range."""
    study = STUDIES[report["setup"]["shape"]]
    with figure(report, path, 1, 4.0) as (axis,):
        for summary in summaries(report):
            if summary.arm not in study.main:
                continue
            steps = [step for step, _ in summary.rows[0]["held_out"]]
            losses = list(zip(*([loss for _, loss in row["held_out"]] for row in summary.rows), strict=True))
            axis.plot(steps, [sum(at) / len(at) for at in losses], label=f"{summary.arm.name}, rate {summary.lr:g}")
            axis.fill_between(steps, [min(at) for at in losses], [max(at) for at in losses], alpha=0.25)
        axis.set_xlabel("steps on text B")
        axis.set_ylabel("held-out loss, nats a byte")
        axis.legend(fontsize=8)


def draw_ablations(report: Report, path: Path) -> None:
    """Held-out loss at the end for everything that was changed: the mean over seeds, and their range."""
    study = STUDIES[report["setup"]["shape"]]
    found = {summary.arm: summary for summary in summaries(report)}
    full = next(summary for arm, summary in found.items() if arm.method == "full")
    with figure(report, path, len(study.ablations), 3.6) as axes:
        low, high = zip(*(summary.range for summary in found.values()), strict=True)
        for axis, what in zip(axes, study.ablations, strict=True):
            values, along = zip(*_along(what, study, found), strict=True)
            means = [summary.mean for summary in along]
            sides = [[s.mean - s.range[0] for s in along], [s.range[1] - s.mean for s in along]]
            axis.errorbar(range(len(values)), means, yerr=sides, marker="o", linestyle="none", capsize=3)
            axis.set_xticks(range(len(values)), values, fontsize=7, rotation=30 * (what not in ("γ", "K")))
            axis.axhspan(*full.range, color="0.5", alpha=0.25, label="full, range")
            axis.set_ylim(min(low) - 0.01, max(high) + 0.01)
            axis.margins(x=0.15)
            axis.set_title(what, fontsize=10)
        axes[0].set_ylabel("held-out loss, nats a byte")
        axes[0].legend(fontsize=8)


LEARNING: dict[str, tuple[Callable[[Report, str], Iterator[str]], dict[str, Callable[[Any, Path], None]]]] = {
    "lisa_learning": (
        tell_learning,
        {"lisa-learning-curves.png": draw_curves, "lisa-learning-ablations.png": draw_ablations},
    ),
    "lisa_learning_gpt2": (tell_learning, {"lisa-learning-gpt2-curves.png": draw_curves}),
}
"""What was learnt: how it is told, and its pictures by file name."""
