"""Whether learning rates carried over, as tables and pictures; and models with equally many weights."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.pictures import figure
from benchmarks.lab.supar_protocol import ARMS, LIKE_MUP
from benchmarks.lab.text import setup_line, table
from lightning_paro.experiments import Optimum, TransferReport

__all__ = ["draw_iso", "draw_sweep", "report_of", "tell_iso", "tell_sweep"]

Report = dict[str, Any]
Row = dict[str, Any]

SHIFT = 1.0
"""Octaves up to which a learning rate carries over, by the protocol."""


def report_of(report: Report) -> TransferReport:
    """The rows of whole seeds, and the dense ones of μP for all arms that are μP there."""
    study, rows = report["study"], list(report["rows"])
    dense = [row for row in rows if row["arm"] == "mup" and row["density"] == 1]
    rows += [row | {"arm": arm} for arm in LIKE_MUP if arm in study["rates"] for row in dense]
    counts = Counter((row["arm"], row["seed"]) for row in rows)
    whole = {arm: len(study["shapes"]) * len(rates) for arm, rates in study["rates"].items()}
    return TransferReport([
        row | {"parameterization": row["arm"]} for row in rows if counts[row["arm"], row["seed"]] == whole[row["arm"]]
    ])  # fmt: skip


def tell_sweep(report: Report, name: str) -> Iterator[str]:
    """The optimum of every arm and density, its shift and regret; then who carries over."""
    study, subject = report["study"], report["subject"]
    best = report_of(report).optima()
    yield from (setup_line(report["setup"]), "")
    yield (
        f"{subject['model']}, base width {subject['base']}: {len(report['rows'])} runs of {study['steps']} steps of "
        f"{study['batch']} × {study['length']} bytes, {len(study['seeds'])} seeds."
    )
    yield ""
    told = sorted(best.items(), key=lambda each: (list(ARMS).index(each[0][0]), -each[0][2]))
    yield from table({
        "arm": [ARMS[arm] for (arm, _, _), _ in told],
        "density": [f"{density:.4g}" for (_, _, density), _ in told],
        "best rate, log2": [f"{b.log2_lr:.2f}{' (end)' * b.is_at_end}" for _, b in told],
        "shift, octaves": ["" if key[2] == 1 else _shift(b) for key, b in told],
        "lowest loss": [f"{b.loss:.4f}" for _, b in told],
        "regret": ["" if key[2] == 1 else f"{b.regret:.4f}" for key, b in told],
    })  # fmt: skip
    yield ""
    verdicts = []
    for arm in dict.fromkeys(arm for (arm, _, _), _ in told):
        largest = max(abs(b.shift) if math.isfinite(b.shift) else math.inf for (other, _, _), b in told if other == arm)
        verdicts.append(f"{ARMS[arm]} {'carries over' if largest <= SHIFT else 'does not'} (at most {largest:.2f})")
    yield "; ".join(verdicts) + "."
    yield ""
    yield f"![Loss against learning rate](pictures/{name.replace('_', '-')}.png)"


def _shift(best: Optimum) -> str:
    return f"{best.shift:+.2f} ± {best.half_width or 0:.2f}{' (end)' * best.is_shift_at_end}"


def draw_sweep(report: Report, path: Path) -> None:
    """Mean loss against learning rate, a panel an arm, a line a density."""
    rows = list(report_of(report).rows)
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    with figure(report, path, len(arms), 3.2) as axes:
        for axis, arm in zip(axes, arms, strict=True):
            mine = [row for row in rows if row["arm"] == arm]
            for density in sorted({row["density"] for row in mine}, reverse=True):
                by_lr: dict[float, list[float]] = {}
                for row in mine:
                    if row["density"] == density:
                        by_lr.setdefault(row["lr"], []).append(row["loss"])
                points = [(lr, statistics.fmean(losses)) for lr, losses in sorted(by_lr.items())]
                axis.plot(*zip(*points, strict=True), marker=".", label=f"ρ = {density:.4g}")
            axis.set_xscale("log", base=2)
            axis.set_xlabel("learning rate")
            axis.set_title(ARMS[arm], fontsize=9)
        found = [row["loss"] for row in rows if math.isfinite(row["loss"])]
        for axis in axes:
            axis.set_ylim(min(found) - 0.05, min(min(found) + 1, max(found) + 0.05))
        axes[0].set_ylabel("loss, nats a byte")
        axes[arms.index("supar")].legend(fontsize=7, loc="upper left")  # where the lines are below


def tell_iso(report: Report, name: str) -> Iterator[str]:
    """Loss at fixed hyperparameters, by width and arm: mean and range over seeds."""
    study = report["study"]
    yield from (setup_line(report["setup"]), "")
    yield (
        f"{study['steps']} steps of {study['batch']} × {study['length']} bytes, {len(study['seeds'])} seeds; mean, and "
        "range over them."
    )
    yield ""
    shapes, lines = _iso(report)
    columns = {"width": [str(width) for width, _ in shapes], "density": [f"{density:g}" for _, density in shapes]}
    for label, losses in lines.items():
        columns[label] = [f"{statistics.fmean(each):.4f} ({min(each):.4f} to {max(each):.4f})" for each in losses]
    yield from table(columns)
    yield ""
    yield f"![Loss of models with equally many weights](pictures/{name.replace('_', '-')}.png)"


def draw_iso(report: Report, path: Path) -> None:
    """Loss against width, a line an arm and rate."""
    shapes, lines = _iso(report)
    with figure(report, path, 1, 3.4) as (axis,):
        for label, losses in lines.items():
            axis.plot([width for width, _ in shapes], [statistics.fmean(each) for each in losses], "o-", label=label)
        axis.set_xticks([w for w, _ in shapes], [f"{width}\nρ = {density:g}" for width, density in shapes])
        axis.set_ylabel("loss, nats a byte")
        axis.legend(fontsize=8)


def _iso(report: Report) -> tuple[list[tuple[int, float]], dict[str, list[list[float]]]]:
    """Shapes, and by arm and rate the losses of each, seed by seed."""
    shapes = [(width, density) for width, density in report["study"]["shapes"]]
    rows = list(report_of(report).rows)
    lines: dict[str, list[list[float]]] = {}
    for arm, rates in report["study"]["rates"].items():
        for lr in rates:
            label = f"{ARMS[arm]}, rate {lr:g}"
            lines[label] = [
                [r["loss"] for r in rows if (r["arm"], r["width"], r["density"], r["lr"]) == (arm, *shape, lr)]
                for shape in shapes
            ]
    return shapes, lines
