"""LISA under ParoStrategy, as tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.lisa_paro_masters import ARMS, Arm
from benchmarks.lab.pictures import figure
from benchmarks.lab.text import setup_line, table, where

__all__ = ["LISA_PARO", "draw_hosts", "draw_masters", "tell_hosts", "tell_masters"]

Report = dict[str, Any]
Row = dict[str, Any]

MIB = 2**20
FULL, KEPT, DROPPED = ARMS


# ---- between hosts -------------------------------------------------------------------------------------------


def tell_hosts(report: Report, name: str) -> Iterator[str]:
    """A table for each cluster: every strategy with all layers trained, and with LISA."""
    for part in report["setups"]:
        setup, rows = part["setup"], part["rows"]
        yield from (f"#### {part['model']}, s = {part['accumulate']}, {where(setup)}", "", setup_line(setup), "")
        switches = max((row["switches"] for row in rows), default=0)
        yield (
            f"{part['parameters'] / 1e6:.2f} million parameters; LISA trains {part['layers']} layers, "
            f"{part['trained'] / 1e6:.2f} million parameters, at a time, others after every {part['interval']} steps. "
            f"Medians of {part['repeats']} × {part['steps']} steps; in {switches} of each {part['steps']} it switches."
        )
        yield ""
        yield from (*_hosts_table(rows), "")
        yield from (f"* Not measured: {who}: {why}." for who, why in part["failed"].items())
        yield ""
    yield f"![Seconds of a step and bytes between hosts, with LISA and without](pictures/{_picture(name)})"


def _hosts_table(rows: list[Row]) -> list[str]:
    columns = {
        "strategy": [row["strategy"] for row in rows],
        "trained": ["with LISA" if row["lisa"] else "all" for row in rows],
        "s/step": [f"{row['step_s']:.3f}" for row in rows],
        "range": ["{:.3f} … {:.3f}".format(*row["range_s"]) for row in rows],
        "times as fast": [_ratio(row, rows, "step_s") for row in rows],
        "MB between hosts, a rank and step": [f"{row['inter_bytes'] / 1e6:.3f}" for row in rows],
        "by the formula": [f"{row['formula_bytes'] / 1e6:.3f}" for row in rows],
        "times less": [_ratio(row, rows, "inter_bytes") for row in rows],
        "MB on a host's link": [f"{row['link_bytes'] / 1e6:.3f}" if row["link_bytes"] else "" for row in rows],
        "model state MiB": [f"{row['held_bytes'] / MIB:.1f}" for row in rows],
        "peak MiB": [f"{row['peak_bytes'] / MIB:.0f}" if row["peak_bytes"] else "" for row in rows],
    }
    return table({title: cells for title, cells in columns.items() if any(cells)})


def _ratio(row: Row, rows: list[Row], key: str) -> str:
    """Of the same strategy with all layers, how many times as much."""
    full = next((other for other in rows if other["strategy"] == row["strategy"] and not other["lisa"]), None)
    return f"{full[key] / row[key]:.2f}" if full and row["lisa"] else ""


def draw_hosts(report: Report, path: Path) -> None:
    """Of every cluster: step time and bytes between hosts."""
    parts = report["setups"]
    with figure(report, path, 2 * len(parts), 2.2) as axes:
        for number, part in enumerate(parts):
            rows = part["rows"][::-1]
            names = [row["strategy"] + ", LISA" * row["lisa"] for row in rows]
            colours = ["tab:orange" if row["lisa"] else "tab:blue" for row in rows]
            time, sent = axes[2 * number : 2 * number + 2]
            time.barh(names, [row["step_s"] for row in rows], color=colours)
            time.set_xlabel("seconds a step")
            sent.barh(names, [row["inter_bytes"] / 1e6 for row in rows], color=colours)
            sent.set_xlabel("MB between hosts a step")
            sent.set_yticklabels([])
            time.set_title(f"{part['model']}, {where(part['setup'])}", fontsize=9)
            time.tick_params(labelsize=8)


# ---- masters -------------------------------------------------------------------------------------------------


def tell_masters(report: Report, name: str) -> Iterator[str]:
    """By learning rate: how much of an update is lost when a layer goes to sleep, and what comes of it."""
    setup = report["setup"]
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    start = report["rows"][0]["before"]
    yield (
        f"{setup['parameters'] / 1e6:.2f} million parameters, pre-trained and rounded to bf16; {setup['steps']} steps "
        f"of {setup['sequences']} × {setup['length']} bytes at a constant rate, LISA with γ={setup['layers']} "
        f"K={setup['interval']}. Losses are of the weights in the end, computed in fp32, in nats a byte over "
        f"{setup['held_out']} held-out windows; {start:.4f} at the start. {versions}."
    )
    yield ""
    rates = sorted({row["lr"] for row in report["rows"]})
    lost = [_row(report, DROPPED, lr)["lost"] for lr in rates]
    names = {FULL: "fp32", KEPT: "masters kept", DROPPED: "masters dropped"}
    yield from table({
        "rate": [f"{lr:g}" for lr in rates],
        "of an update lost at a sleep, masters dropped": [f"{_mean(shares):.1%}" for shares in lost],
        "range": [f"{min(shares):.1%} … {max(shares):.1%}" for shares in lost],
        "masters kept": [f"{_mean(_row(report, KEPT, lr)['lost']):.1%}" for lr in rates],
        **{f"loss, {word}": [f"{_row(report, arm, lr)['loss']:.4f}" for lr in rates] for arm, word in names.items()},
        **{
            f"of fp32's fall, {names[arm]}": [f"{_fall(report, arm, lr):.1%}" for lr in rates]
            for arm in (KEPT, DROPPED)
        },
    })  # fmt: skip
    yield ""
    yield f"![How much of an update is lost when a master is dropped, by learning rate](pictures/{_picture(name)})"


def draw_masters(report: Report, path: Path) -> None:
    """Every sleep's loss by rate, and how much of what fp32 learnt the others learnt."""
    rates = sorted({row["lr"] for row in report["rows"]})
    with figure(report, path, 2, 3.2) as axes:
        for lr in rates:
            lost = _row(report, DROPPED, lr)["lost"]
            axes[0].scatter([lr] * len(lost), lost, s=12, color="tab:blue", alpha=0.5)
        axes[0].plot(rates, [_mean(_row(report, DROPPED, lr)["lost"]) for lr in rates], color="tab:blue")
        axes[0].set_yscale("log")
        axes[0].set_ylabel("of an update's norm, lost at a sleep")
        for arm in (KEPT, DROPPED):
            axes[1].plot(rates, [100 * _fall(report, arm, lr) for lr in rates], marker="o", label=arm.name)
        axes[1].axhline(100, color="0.6", linewidth=1)
        axes[1].set_ylabel("% of fp32's fall of the loss")
        axes[1].legend(fontsize=8)
        for axis in axes:
            axis.set_xscale("log")
            axis.set_xlabel("learning rate")


def _row(report: Report, arm: Arm, lr: float) -> Row:
    return next(row for row in report["rows"] if Arm(**row["arm"]) == arm and row["lr"] == lr)


def _fall(report: Report, arm: Arm, lr: float) -> float:
    """How far the held-out loss fell, of how far it fell in fp32."""
    row, full = _row(report, arm, lr), _row(report, FULL, lr)
    fall: float = (row["before"] - row["loss"]) / (full["before"] - full["loss"])
    return fall


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares)


def _picture(name: str) -> str:
    return f"{name.replace('_', '-')}.png"


LISA_PARO: dict[str, tuple[Callable[[Report, str], Iterator[str]], dict[str, Callable[[Any, Path], None]]]] = {
    "lisa_paro": (tell_hosts, {"lisa-paro.png": draw_hosts}),
    "lisa_masters": (tell_masters, {"lisa-masters.png": draw_masters}),
}
"""What was measured: how it is told, and its pictures by file name."""
