"""Where the time of a step goes: its parts beside those without communication, and what the engine costs the host.

Host time is told by hooks and brackets of the engine, with launches, waits for the device, and memory that stays.

    python benchmarks/trace.py --partition iig --blocks 4 --steps 1000
    python benchmarks/trace.py --gpus 0 --model tiny-gpt2 --accumulate 2 --steps 20     # on the CPU

In a steady state the engine itself makes no synchronisation of the device; those listed are the model's or the
optimizer's. Memory reserved by the allocator has to stay where it is over a thousand steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab.cluster import Cluster, described
from benchmarks.lab.contestants import CONTESTANTS
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import result, save
from benchmarks.lab.tracing import PHASES, growth


def show_phases(by_contestant: dict[str, dict[str, float]], title: str) -> None:
    """The parts of a step; on a GPU, of its time."""
    table = Table(title=title)
    table.add_column("ms")
    for name in by_contestant:
        table.add_column(name, justify="right")
    for phase in PHASES:
        if all(phase in found for found in by_contestant.values()):
            table.add_row(phase, *(f"{1e3 * found[phase]:.1f}" for found in by_contestant.values()))
    Console(width=120).print(table)


def show(found: dict[str, Any], title: str) -> None:
    """The slowest rank's figures."""
    table = Table(title=title)
    for column in ("entry", "calls a step", "host ms a step"):
        table.add_column(column, justify="left" if column == "entry" else "right")
    for name, seconds in sorted(found["host_s"].items(), key=lambda item: -item[1]):
        table.add_row(name, f"{found['calls'][name]:.0f}", f"{1e3 * seconds:.2f}")
    table.add_row("together", "", f"{1e3 * sum(found['host_s'].values()):.2f}", style="bold")
    console = Console()
    console.print(table)
    console.print(f"{1e3 * found['step_s']:.1f} ms a step, {found['launches']} collectives launched")
    for where, count in found["synchronisations"].items():
        console.print(f"the host waits for the device {count} times a step at {where}")
    if found["reserved"]:
        grown = growth(found["reserved"])
        console.print(f"memory reserved grew by {grown} bytes; {found['left_bytes']} bytes are left after teardown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 2, 4), help="0 is the CPU")
    parser.add_argument("--model", default="gpt2-medium", choices=MODELS)
    parser.add_argument("--partition", nargs="+", default=["iig"])
    peers = [name for name, entry in CONTESTANTS.items() if entry.where.startswith("peers:")]
    parser.add_argument("--beside", nargs="+", default=[], choices=peers, metavar="NAME", help="peers of torch itself")
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4, help="that travel by one launch")
    parser.add_argument("--steps", type=int, default=50, help="over which memory is watched")
    parser.add_argument("--out", type=Path, help="results/trace.json, or without GPUs trace-trial.json")
    arguments = parser.parse_args()
    options = {"model": arguments.model, "accumulate": arguments.accumulate, "blocks": arguments.blocks}
    parts, traces = {}, {}
    with Cluster(arguments.hosts, per_host=2, gpus=arguments.gpus) as cluster:
        setup = described(cluster)
        for name in ("floor", *(f"paro_{partition}" for partition in arguments.partition), *arguments.beside):
            ranks = cluster.call("benchmarks.lab.tracing:phases", contestant=name, timeout=600, **options)
            parts[name] = max(ranks, key=lambda rank: sum(rank.values()))
        show_phases(parts, f"{arguments.model}, s={arguments.accumulate}, {arguments.blocks} blocks a launch")
        for partition in arguments.partition:
            ranks = cluster.call(
                "benchmarks.lab.tracing:trace", partition=partition, steps=arguments.steps, timeout=3600, **options
            )
            found = max(ranks, key=lambda rank: rank["step_s"])
            show(found, f"paro_{partition}, {arguments.model}, s={arguments.accumulate}")
            traces[f"paro_{partition}"] = found | {"left_bytes": max(rank["left_bytes"] for rank in ranks)}
    report = {"setup": setup, **options, "steps": arguments.steps, "phases_s": parts, "traces": traces}
    save(report, arguments.out or result("trace", arguments.gpus))


if __name__ == "__main__":
    main()
