"""What LISA saves, as tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.lisa_arms import ARMS, SHAPES, TIMED
from benchmarks.lab.lisa_memory import KINDS
from benchmarks.lab.lisa_results import speeds
from benchmarks.lab.lisa_time import OPERATIONS, PARTS
from benchmarks.lab.pictures import figure
from benchmarks.lab.races import bars_table
from benchmarks.lab.text import setup_line, table

__all__ = ["draw_memory", "draw_time", "tell_memory", "tell_time"]

Report = dict[str, Any]
Row = dict[str, Any]

GIB = 2**30


# ---- memory --------------------------------------------------------------------------------------------------


def tell_memory(report: Report, name: str) -> Iterator[str]:
    """A table for each model and attention, the state that is kept without need, and the bars."""
    rows = report["rows"]
    yield from (setup_line(report["setup"]), "")
    for shape in _shapes(rows):
        for attention in ("sdpa", "eager"):
            mine = _of(rows, shape=shape, attention=attention)
            done = [row for row in mine if row["status"] == "ok"]
            if done:
                millions = min(row["parameters"] for row in done) / 1e6
                yield from (f"#### {shape}, {millions:,.0f} million parameters, {attention} attention", "")
                yield from (*_memory_table(done), "")
                yield from _kept(done)
            yield from _failed(mine)
    if known := [bar for bar in report["bars"] if bar["value"] is not None]:
        yield from (*bars_table(known), "")
    yield f"![Memory by part, and optimizer state by period](pictures/{_picture(name)})"


def _memory_table(rows: list[Row]) -> list[str]:
    columns = {
        "GiB": [ARMS[row["arm"]].text for row in rows],
        "trained at a time": [f"{row['trained'] / 1e6:,.0f} M" for row in rows],
        **{kind: [_gib(row[f"{kind}_bytes"]) for row in rows] for kind in KINDS},
        "by the formula, together": [_gib(row["formula_bytes"]) for row in rows],
        "error": [f"{row['error']:+.2%}" for row in rows],
        "activations and the rest": [_gib(row["activations_bytes"]) for row in rows],
        "**peak**": [f"**{_gib(row['peak_bytes'])}**" for row in rows],
        "reserved": [_gib(row["reserved_bytes"]) for row in rows],
    }
    measured = any(row["peak_bytes"] for row in rows)
    return table(columns if measured else dict(list(columns.items())[:-3]))


def _kept(rows: list[Row]) -> Iterator[str]:
    """How state grows that is not forgotten."""
    by_arm = {row["arm"]: row for row in rows}
    if {"lisa_2", "lisa_2_keep"} <= by_arm.keys():
        ours, kept = by_arm["lisa_2"], by_arm["lisa_2_keep"]
        first, last = (_gib(kept["states_by_period"][place]) for place in (0, -1))
        most = _gib(max(ours["states_by_period"]))
        told = f"{kept['periods']} periods of {kept['interval']} steps"
        yield f"In {told} {kept['layers_seen']} of {kept['layers']} layers were trained."
        yield f"Optimizer state that is kept grew from {first} to {last} GiB; else it is {most} GiB at most."
        yield ""


def draw_memory(report: Report, path: Path) -> None:
    """Of the largest model: the parts of every arm's peak, and the growth of state that is kept."""
    shape = _shapes(report["rows"])[0]
    done = [row for row in _of(report["rows"], shape=shape) if row["status"] == "ok"]
    attention = "sdpa" if any(row["attention"] == "sdpa" for row in done) else "eager"
    rows = [row for row in done if row["attention"] == attention]
    with figure(report, path, 2, 3.8) as axes:
        names, left = [ARMS[row["arm"]].text for row in rows], [0.0] * len(rows)
        for kind in (*KINDS, "activations"):
            widths = [(row[f"{kind}_bytes"] or 0) / GIB for row in rows]
            axes[0].barh(names, widths, left=left, label=kind)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes[0].invert_yaxis()
        axes[0].tick_params(labelsize=8)
        axes[0].set_xlabel("GiB")
        axes[0].set_title(f"{shape}, {attention}", fontsize=10)
        axes[0].legend(fontsize=8, loc="center right")
        for row in rows:
            if ARMS[row["arm"]].is_long:
                sizes = [size / GIB for size in row["states_by_period"]]
                axes[1].plot(range(1, len(sizes) + 1), sizes, label=ARMS[row["arm"]].text)
        axes[1].set_xlabel("period")
        axes[1].set_ylabel("optimizer state, GiB")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(fontsize=8)


# ---- time ----------------------------------------------------------------------------------------------------


def tell_time(report: Report, name: str) -> Iterator[str]:
    """A table for each model, with how much of what arithmetic allows is reached, and where the time goes."""
    rows = report["rows"]
    yield from (setup_line(report["setup"]), "")
    found = speeds(rows)
    for shape in _shapes(rows):
        mine = [speed for speed in found if speed.row["shape"] == shape]
        mine.sort(key=lambda s: (s.row["batch"], s.row["compiled"], TIMED.index(s.row["arm"])))
        yield from (f"#### {shape}", "")
        if mine:
            parts = (*PARTS, "step")
            times = {f"{part}, ms": [f"{1000 * s.row[f'{part}_s']:.1f}" for s in mine] for part in parts}
            yield from table({
                "batch": [str(s.row["batch"]) for s in mine],
                "arm": [ARMS[s.row["arm"]].text + ", compiled" * s.row["compiled"] for s in mine],
                **times,
                "first step of a period": [f"{1000 * s.row['switch_s']:.1f}" for s in mine],
                "forward and backward × full": [f"{s.passes:.2f}" for s in mine],
                "by arithmetic": [f"{s.passes_bound:.2f}" for s in mine],
                "step × full": [f"{s.step:.2f}" for s in mine],
                "by arithmetic ": [f"{s.step_bound:.2f}" for s in mine],
            })  # fmt: skip
            yield ""
        profiles = [row for row in _of(rows, shape=shape, measure="profile") if row.get("operations_s")]
        if profiles:
            what = [*OPERATIONS, "rest"]
            columns = {f"{ARMS[r['arm']].text}, batch {r['batch']}": r["operations_s"] for r in profiles}
            yield from table({
                "ms a step, on the device": what,
                **{title: [f"{1000 * spent[one]:.1f}" for one in what] for title, spent in columns.items()},
            })  # fmt: skip
            yield ""
        yield from _failed(_of(rows, shape=shape))
    yield f"![Milliseconds of a step by part](pictures/{_picture(name)})"


def draw_time(report: Report, path: Path) -> None:
    """Of the largest model: the parts of every arm's step, a panel for each batch."""
    times = [speed.row for speed in speeds(report["rows"])]
    rows = _of(times, shape=_shapes(times)[0]) if times else []
    batches = sorted({row["batch"] for row in rows})
    with figure(report, path, max(1, len(batches)), 2.8) as axes:
        for axis, batch in zip(axes, batches, strict=False):
            mine = [row for row in rows if row["batch"] == batch]
            names = [ARMS[row["arm"]].text + ", compiled" * row["compiled"] for row in mine]
            left = [0.0] * len(mine)
            for part in PARTS:
                widths = [1000 * row[f"{part}_s"] for row in mine]
                axis.barh(names, widths, left=left, label=part)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            axis.invert_yaxis()
            axis.tick_params(labelsize=8)
            axis.set_xlabel("milliseconds")
            axis.set_title(f"{mine[0]['shape']}, batch {batch}", fontsize=10)
        axes[0].legend(fontsize=8, loc="lower right")


# ---- both ----------------------------------------------------------------------------------------------------


def _shapes(rows: list[Row]) -> list[str]:
    """Models that there are rows of, the largest first."""
    return [shape for shape in SHAPES if _of(rows, shape=shape)]


def _of(rows: list[Row], **values: Any) -> list[Row]:
    """The rows of these values, in the order of arms."""
    found = [row for row in rows if values.items() <= row.items()]
    return sorted(found, key=lambda row: list(ARMS).index(row["arm"]))


def _failed(rows: list[Row]) -> Iterator[str]:
    missed = [row for row in rows if row["status"] != "ok"]
    for row in missed:
        what = "profile of " * (row["measure"] == "profile") + ARMS[row["arm"]].text
        batch = f", batch {row['batch']}" if "batch" in row else ""
        yield f"* Not measured: {what}{batch}{', compiled' if row.get('compiled') else ''}: {row['status']}."
    if missed:
        yield ""


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f}"


def _picture(name: str) -> str:
    return f"{name.replace('_', '-')}.png"
