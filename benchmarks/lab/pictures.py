"""Pictures of what the JSON in results/ says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lab.contestants import partitions

__all__ = [
    "digest", "draw_collectives", "draw_guideline", "draw_one_sided", "draw_phases", "draw_scaling", "draw_table",
    "figure",
]  # fmt: skip

MIB, GIB = 2**20, 2**30


def digest(data: Any) -> str:
    """Stands in a picture for the data it was drawn from, so that a stale one is known without drawing it again."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@contextmanager
def figure(data: Any, path: Path, panels: int, height: float) -> Iterator[Any]:
    """The panels of a picture, one beside the other, saved in the end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(10, height), squeeze=False, layout="constrained")
    yield axes[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Source": digest(data)})
    pyplot.close(figure)


def draw_table(table: dict[str, Any], path: Path) -> None:
    """Step time of every row of a race's table, with its range, and its memory where that was measured."""
    rows = table["rows"][::-1]
    names = [row["contestant"] for row in rows]
    colours = [_colour(name) for name in names]
    has_memory = any(row["peak_bytes"] for row in rows)
    with figure(table, path, 2 if has_memory else 1, 0.9 + 0.21 * len(rows)) as axes:
        sides = [[max(0.0, r["step_s"] - r["range_s"][0]) for r in rows]]
        sides += [[max(0.0, r["range_s"][1] - r["step_s"]) for r in rows]]
        axes[0].barh(names, [r["step_s"] for r in rows], color=colours, xerr=sides, error_kw={"linewidth": 1})
        axes[0].set_xlabel("seconds a step")
        if has_memory:
            axes[1].barh(names, [r["peak_bytes"] / GIB for r in rows], color=colours)
            axes[1].set_xlabel("peak GiB a rank")
            axes[1].set_yticklabels([])
        for axis in axes:
            axis.margins(y=0.01)
            axis.tick_params(labelsize=8)


def _colour(name: str) -> str:
    if name in ("floor", "legs"):
        return "0.5"
    return "tab:orange" if name in partitions() else "tab:blue"


def draw_collectives(report: dict[str, Any], path: Path) -> None:
    """How many times as fast two levels are as one, against the size."""
    parts = report["setups"]
    with figure(report, path, len(parts), 3.4) as axes:
        for axis, part in zip(axes, parts, strict=True):
            for operation in dict.fromkeys(row["operation"] for row in part["rows"]):
                rows = [row for row in part["rows"] if row["operation"] == operation]
                axis.plot([r["nbytes"] / MIB for r in rows], [r["speedup"] for r in rows], marker="o", label=operation)
            axis.axhline(1, color="0.6", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_xlabel("MiB")
            axis.set_ylabel("two levels, times as fast as flat")
            axis.set_title(f"{part['setup']['hosts']} hosts x {part['setup']['ranks_per_host']}", fontsize=10)
            axis.legend(fontsize=8)


def draw_scaling(report: dict[str, Any], path: Path) -> None:
    """Step time against the size of the model, and against s of the model for which that was varied."""
    counts: dict[str, set[int]] = {}
    for row in report["rows"]:
        counts.setdefault(row["model"], set()).add(row["accumulate"])
    base = max(counts, key=lambda model: len(counts[model]))
    size = max(min(counts.values(), key=len))
    panels = (
        ("parameters", "parameters", f"s={size}; dashed: the planner", ("accumulate", size)),
        ("accumulate", "micro-batches a step", base, ("model", base)),
    )
    with figure(report, path, len(panels), 3.6) as axes:
        for axis, (key, label, title, (where, value)) in zip(axes, panels, strict=True):
            rows = [row for row in report["rows"] if row[where] == value]
            for number, name in enumerate(dict.fromkeys(row["contestant"] for row in report["rows"])):
                points = sorted((r[key], r["step_s"], r["predicted_s"]) for r in rows if r["contestant"] == name)
                if points:
                    x, measured, expected = zip(*points, strict=True)
                    axis.plot(x, measured, marker="o", color=f"C{number}", label=name)
                    axis.plot(x, expected, linestyle="--", color=f"C{number}")
            axis.set_xlabel(label)
            axis.set_ylabel("seconds a step")
            axis.set_ylim(bottom=0)
            axis.set_title(title, fontsize=10)
        axes[0].legend(fontsize=8)


def draw_guideline(report: dict[str, Any], path: Path) -> None:
    """Measured step time of every partition, and what was predicted for it, a panel for each setting."""
    with figure(report, path, len(report["settings"]), 4.2) as axes:
        for axis, setting in zip(axes, report["settings"], strict=True):
            rows = setting["rows"][::-1]
            names = [row["partition"] for row in rows]
            axis.barh(names, [row["measured_s"] for row in rows], color="tab:orange", label="measured")
            axis.scatter([row["predicted_s"] for row in rows], names, s=16, color="black", zorder=2, label="predicted")
            axis.set_xlabel("seconds a step")
            axis.set_title(f"{setting['model']}, s={setting['accumulate']}", fontsize=10)
            axis.margins(y=0.01)
            axis.legend(fontsize=8)


def draw_one_sided(report: dict[str, Any], path: Path) -> None:
    """How much longer a computation takes beside gathers of each kind, against their size."""
    with figure(report, path, len(report["setups"]), 3.4) as axes:
        for axis, part in zip(axes, report["setups"], strict=True):
            rows, setup = part["rows"], part["setup"]
            sizes = [row["mebibytes"] for row in rows]
            for way in ("collective", "copies"):
                longer = [row[way]["beside_s"] / row["computation_s"] for row in rows]
                axis.plot(sizes, longer, marker="o", label=way)
            axis.axhline(1, color="0.6", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_xlabel("MiB a gather")
            axis.set_ylabel("computation beside gathers, of alone")
            axis.set_title(f"{setup['hosts'] * setup['ranks_per_host'] // setup['gpus']} ranks a GPU", fontsize=10)
            axis.legend(fontsize=8)


def draw_phases(report: dict[str, Any], path: Path) -> None:
    """The parts of a step, one on top of the other, of everybody that was traced."""
    who = list(report["phases_s"])
    with figure(report, path, 1, 0.6 + 0.5 * len(who)) as (axis,):
        left = [0.0] * len(who)
        for phase in dict.fromkeys(phase for parts in report["phases_s"].values() for phase in parts):
            widths = [1000 * parts.get(phase, 0.0) for parts in report["phases_s"].values()]
            axis.barh(who, widths, left=left, label=phase)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_xlabel("milliseconds; of forwards and backwards between the first and the last, one of each")
        axis.legend(fontsize=8)
