"""What LISA saves on one GPU: memory beside the formula, and time beside arithmetic. Random weights, no downloads.

A fresh process an arm for memory, several at a time; times one after another::

    python -m benchmarks.lisa memory
    python -m benchmarks.lisa time

Rows are written one by one, and what is in the file already is not measured again. To see that everything runs::

    python -m benchmarks.lisa memory --device cpu --shape tiny
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.lab.lisa_arms import ARMS, SHAPES, TIMED, arms_of, claim
from benchmarks.lab.lisa_results import memory_bars, speeds, told_bars
from benchmarks.lab.lisa_runs import Job, Results, run, setup_of
from benchmarks.lab.report import result

GIB = 2**30
PUBLIC = [name for name in SHAPES if name.partition("-")[0] != "tiny"]


def memory_jobs(shapes: list[str], attentions: list[str], arms: list[str]) -> Iterator[Job]:
    """An arm a process."""
    for shape in shapes:
        for attention in attentions:
            for arm in arms_of(shape):
                if arm in arms:
                    run = {"measure": "memory", "shape": shape, "attention": attention, "arm": arm}
                    yield Job((run,), claim(shape, arm))


def time_jobs(shapes: list[str], batches: list[int], compiled: bool) -> Iterator[Job]:
    """All arms of a model and batch in one process, one after another; in the end, profiles of two steps."""
    settings = [{"shape": shape, "batch": batch} for shape in shapes for batch in batches]
    for variant in (False, True)[: 1 + compiled]:
        for setting in settings:
            yield Job(tuple({"measure": "time", **setting, "arm": arm, "compiled": variant} for arm in TIMED))
    for setting in settings:
        yield Job(tuple({"measure": "profile", **setting, "arm": arm} for arm in ("full", "lisa_2")))


def show_memory(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['setup']['device']}: GiB")
    for column in (
        "model",
        "attention",
        "arm",
        "weights",
        "gradients",
        "states",
        "formula",
        "error",
        "peak",
        "reserved",
    ):
        table.add_column(column, justify="left" if column in ("model", "attention", "arm") else "right")
    for row in report["rows"]:
        told = [row["status"]]
        if row["status"] == "ok":
            kinds = (row[f"{kind}_bytes"] for kind in ("weights", "gradients", "states", "formula"))
            peaks = (row["peak_bytes"], row["reserved_bytes"])
            told = [*map(_gib, kinds), f"{row['error']:+.2%}", *map(_gib, peaks)]
        table.add_row(row["shape"], row["attention"], row["arm"], *told)
    Console(width=150).print(table)
    for bar in report["bars"]:
        verdict = {True: "reached", False: "missed", None: "not known"}[bar["reached"]]
        print(f"{verdict}: {bar['text']}: {bar['value']} <= {bar['needed']}")


def show_time(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['setup']['device']}: ms; times as fast as full, by arithmetic in brackets")
    for column in ("model", "batch", "arm", "forward", "backward", "update", "step", "passes", "step "):
        table.add_column(column, justify="left" if column in ("model", "arm") else "right")
    for speed in speeds(report["rows"]):
        row = speed.row
        times = (f"{1000 * row[f'{part}_s']:.2f}" for part in ("forward", "backward", "update", "step"))
        ratios = ((speed.passes, speed.passes_bound), (speed.step, speed.step_bound))
        arm = row["arm"] + ", compiled" * row["compiled"]
        table.add_row(
            row["shape"],
            str(row["batch"]),
            arm,
            *times,
            *(f"{measured:.2f} ({bound:.2f})" for measured, bound in ratios),
        )
    Console(width=150).print(table)


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory", help="what every arm holds, and its peak")
    memory.add_argument("--attention", nargs="+", choices=("eager", "sdpa"), default=["sdpa", "eager"])
    memory.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    memory.add_argument("--parallel", type=int, default=4, help="processes at a time, where the GPU has room for them")
    time = commands.add_parser("time", help="forward, backward, optimizer and whole step")
    time.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="SEQUENCES")
    time.add_argument("--compile", action="store_true", help="measure it again with every layer compiled")
    for command in (memory, time):
        command.add_argument("--shape", nargs="+", choices=list(SHAPES), default=PUBLIC, metavar="MODEL")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--out", type=Path, help="the default is in benchmarks/results/")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU. HINT: --device cpu --shape tiny shows that everything runs.")
    out = given.out or result(f"lisa_{given.command}", gpus=int(given.device == "cuda"))
    if given.command == "memory":
        results = Results(out, setup_of(given.device), lambda rows: {"bars": told_bars(memory_bars(rows))})
        run(memory_jobs(given.shape, given.attention, given.arms), results, given.device, given.parallel)
        show_memory(results.report)
    else:
        results = Results(out, setup_of(given.device), lambda rows: {})
        run(time_jobs(given.shape, given.batch, given.compile), results, given.device)
        show_time(results.report)


if __name__ == "__main__":
    main()
