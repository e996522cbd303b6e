"""LISA under ParoStrategy: between uneven hosts, and what becomes of updates below the resolution of bf16.

paro_nig and paro_iig, each with all layers trained and with LISA training two of them: GPT-2 medium on GPUs that pose
as two hosts of two ranks, or without GPUs its shape made smaller, between network namespaces with a slow link::

    python -m benchmarks.lisa_paro hosts --gpus 2
    sudo .venv/bin/python -m benchmarks.lisa_paro hosts --mbit 100

A small model of the standard library's text, on one core, with master weights of frozen layers dropped and kept::

    OMP_NUM_THREADS=1 python -m benchmarks.lisa_paro masters
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab import lisa_paro, namespaces
from benchmarks.lab.cluster import ROOT, Cluster, RankFailed, described
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import RESULTS, result, save
from lightning_paro.topology import Topology

WARMUP, MEASURED = 2, 6
"""Steps; of those that are measured two switch layers."""


def race(cluster: Cluster, model: str, accumulate: int, repeats: int) -> dict[str, Any]:
    """Every strategy without LISA and with it, as often as told, in turns; what fails is a row that says so."""
    setup, topology = described(cluster), Topology(cluster.world_size, cluster.per_host)
    itemsize = 2 if cluster.gpus else 4
    who = [(strategy, lisa) for strategy in lisa_paro.STRATEGIES for lisa in (False, True)]
    measured: dict[tuple[str, bool], list[Any]] = {one: [] for one in who}
    failed: dict[tuple[str, bool], str] = {}
    for turn in range(repeats):
        for strategy, lisa in who if turn % 2 == 0 else who[::-1]:
            if (strategy, lisa) in failed:
                continue
            options = {"model": model, "accumulate": accumulate, "warmup": WARMUP, "measured": MEASURED}
            try:
                ranks = cluster.call(
                    "benchmarks.lab.lisa_paro:measure", timeout=300, strategy=strategy, lisa=lisa, **options
                )
            except RankFailed as failure:
                failed[strategy, lisa] = str(failure)
            else:
                measured[strategy, lisa].append(ranks)
            print(f"{strategy}{', LISA' * lisa}, {turn + 1} of {repeats}: {failed.get((strategy, lisa), 'ok')}")
    rows = []
    for strategy, lisa in who:
        if (strategy, lisa) not in failed:
            formula = lisa_paro.between_hosts(lisa_paro.trained(model, lisa), itemsize, topology)
            rows.append(lisa_paro.row_of(strategy, lisa, measured[strategy, lisa], formula))
    return {
        "setup": setup, "model": model, "accumulate": accumulate, "layers": lisa_paro.LAYERS,
        "interval": lisa_paro.INTERVAL, "repeats": repeats, "steps": MEASURED,
        "parameters": lisa_paro.trained(model, lisa=False), "trained": lisa_paro.trained(model, lisa=True),
        "rows": rows, "failed": {f"{strategy}{', LISA' * lisa}": why for (strategy, lisa), why in failed.items()},
    }  # fmt: skip


def keep(part: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write what was measured on a cluster in the place of what was measured on one of its kind, beside the others."""
    before = json.loads(path.read_text())["setups"] if path.exists() else []
    kind = ("hosts", "ranks_per_host", "gpus")
    others = [other for other in before if any(other["setup"][key] != part["setup"][key] for key in kind)]
    report = {"setups": sorted([*others, part], key=lambda one: -int(one["setup"]["gpus"]))}
    save(report, path)
    return report


def show_hosts(part: dict[str, Any]) -> None:
    setup = part["setup"]
    where = f"{part['model']}, s={part['accumulate']}: {setup['hosts']} hosts x {setup['ranks_per_host']}"
    table = Table(title=f"{where}, {setup['device']}; {setup['network']}")
    for column in ("strategy", "trained", "s/step", "range", "MB to other hosts", "formula", "held MiB", "peak MiB"):
        table.add_column(column, justify="right")
    for row in part["rows"]:
        low, high = row["range_s"]
        table.add_row(
            row["strategy"], f"{part['layers']} layers" if row["lisa"] else "all", f"{row['step_s']:.3f}",
            f"{low:.3f} .. {high:.3f}", f"{row['inter_bytes'] / 1e6:.3f}", f"{row['formula_bytes'] / 1e6:.3f}",
            f"{row['held_bytes'] / 2**20:.0f}", f"{row['peak_bytes'] / 2**20:.0f}",
        )  # fmt: skip
    Console(width=140).print(table)
    for who, why in part["failed"].items():
        print(f"{who}: {why}")


def hosts(arguments: argparse.Namespace) -> None:
    mbit, gpus = arguments.mbit, 0 if arguments.mbit else arguments.gpus
    model = arguments.model or ("gpt2-medium" if gpus else "cpu-gpt2-medium")
    out = arguments.out or result("lisa_paro", gpus)
    with namespaces.cluster(2, mbit) if mbit else Cluster(2, per_host=2, gpus=gpus) as cluster:
        part = race(cluster, model, arguments.accumulate, arguments.repeats)
    keep(part, out)
    show_hosts(part)


def masters(arguments: argparse.Namespace) -> None:
    from benchmarks.lab.learning_arms import STUDIES
    from benchmarks.lab.learning_runs import Lab
    from benchmarks.lab.lisa_paro_masters import ARMS, RATES, run, study
    from benchmarks.lab.lisa_runs import setup_of

    lab = Lab("small", STUDIES["small"], "cpu", ROOT / "checkpoints")
    rows = []
    for lr in RATES:
        for arm in ARMS:
            row = run(lab, arm, lr)
            rows.append(row)
            mean = sum(row["lost"]) / len(row["lost"])
            print(f"{lr:g}, {arm.name}: {mean:.2%} of an update lost, loss {row['loss']:.4f}", flush=True)
    save({"setup": setup_of("cpu") | study(lab), "rows": rows}, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    between = commands.add_parser("hosts", help="step time and bytes between hosts, with LISA and without")
    between.add_argument("--gpus", type=int, default=2, choices=(0, 2, 4), help="0 is the CPU")
    between.add_argument("--mbit", type=int, help="hosts are network namespaces with links of this rate, without GPUs")
    between.add_argument("--model", choices=MODELS, help="default: gpt2-medium, on the CPU its shape made smaller")
    between.add_argument("--accumulate", type=int, default=4)
    between.add_argument("--repeats", type=int, default=3)
    between.add_argument("--out", type=Path, help="results/lisa_paro.json, or without GPUs lisa_paro-trial.json")
    lost = commands.add_parser("masters", help="what is lost with the master weights of frozen layers")
    lost.add_argument("--out", type=Path, default=RESULTS / "lisa_masters.json")
    arguments = parser.parse_args()
    {"hosts": hosts, "masters": masters}[arguments.command](arguments)


if __name__ == "__main__":
    main()
