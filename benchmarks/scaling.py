"""Cost against the size of the model and against the number of micro-batches, beside what the planner predicts.

The planner gets what its own probe measured between the ranks, and the time of a micro-batch without any communication;
it assumes that communication and computation overlap as far as they can. Their sum is shown as well::

    python benchmarks/scaling.py --hosts 2 --gpus 2
    sudo .venv/bin/python benchmarks/scaling.py --mbit 400      # no GPU: as in cpu_hosts.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import namespaces
from benchmarks.lab.cluster import Cluster
from benchmarks.lab.guideline import BLOCKS, workload
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import result, save
from benchmarks.lab.schedule import Job, Race, Record
from lightning_paro.planner import Cost, Network, Workload, cost
from lightning_paro.topology import Partition, Topology

NAMES = ("paro_nig", "paro_iig", "paro_ggg", "fsdp_full")
SIZES = ["gpt2-small", "gpt2-medium", "gpt2-large"]
CPU_SIZES = ["cpu-gpt2-small", "cpu-gpt2", "cpu-gpt2-large"]
COUNTS = [1, 2, 4, 8, 16]


def predicted(contestant: str, work: Workload, network: Network) -> Cost:
    """FULL_SHARD is ggg on flat rings."""
    if contestant == "fsdp_full":
        return cost(Partition.parse("ggg"), work, network, "flat")
    return cost(Partition.parse(contestant), work, network)


def measure(race: Race, models: list[str], counts: list[int], base: str) -> tuple[dict[str, float], list[Record]]:
    """Seconds of a micro-batch without communication, by model; and every contestant in every setting."""
    settings = [(model, max(c for c in counts if c <= 8)) for model in models]
    settings += [(base, count) for count in counts if (base, count) not in settings]
    compute, records = {}, []
    for model, accumulate in settings:
        if model not in compute:
            floor = race.do(Job("floor", model, accumulate, 1, repeat=1))
            if not floor.seconds:
                continue  # there is nothing to predict from
            compute[model] = floor.median / accumulate
        records += [race.do(Job(name, model, accumulate, BLOCKS, repeat=1)) for name in NAMES]
    return compute, [record for record in records if record.seconds]


def compare(compute: dict[str, float], records: list[Record], network: Network, precision: str) -> list[dict[str, Any]]:
    """A row for each record, with the error of its prediction."""
    rows = []
    for record in records:
        job = record.job
        work = workload(job.model, job.accumulate, compute[job.model], precision)
        expected = predicted(job.contestant, work, network)
        rows.append({
            "contestant": job.contestant, "model": job.model, "parameters": int(work.parameters),
            "accumulate": job.accumulate, "step_s": record.median, "peak_bytes": record.peak_bytes,
            "predicted_s": expected.step_s, "in_turn_s": expected.comm_s + expected.compute_s,
            "error": expected.step_s / record.median - 1,
        })  # fmt: skip
    return rows


def show(report: dict[str, Any]) -> None:
    setup = report["setup"]
    table = Table(title=f"{setup['hosts']} hosts x {setup['ranks_per_host']}, {setup['device']}")
    for column in ("contestant", "model", "M", "s", "measured s", "predicted s", "error", "in turn s"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["contestant"], row["model"], f"{row['parameters'] / 1e6:.0f}", str(row["accumulate"]),
            f"{row['step_s']:.3f}", f"{row['predicted_s']:.3f}", f"{row['error']:+.0%}", f"{row['in_turn_s']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 4))
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 2, 4), help="0 is the CPU")
    parser.add_argument("--mbit", type=int, help="hosts are network namespaces with links of this rate, without GPUs")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="three sizes of GPT-2, small ones with --mbit")
    parser.add_argument("--base", choices=MODELS, help="the model whose s is varied; the second one")
    parser.add_argument("--accumulate", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--limit", type=float, default=3600, help="seconds; what does not fit is left out and named")
    parser.add_argument("--out", type=Path, help="results/scaling.json, or without GPUs scaling-trial.json")
    arguments = parser.parse_args()
    mbit, gpus = arguments.mbit, arguments.gpus
    models = arguments.models or (CPU_SIZES if mbit else SIZES)
    base = arguments.base or models[min(1, len(models) - 1)]
    out = arguments.out or result("scaling", 0 if mbit else gpus)
    hosts = arguments.hosts
    with namespaces.cluster(hosts, mbit) if mbit else Cluster(hosts, per_host=2, gpus=gpus) as cluster:
        race = Race(cluster, arguments.limit, out.with_suffix(".jsonl"))
        race.begin()
        probed = cluster.call("benchmarks.lab.links:measure")[0]
        compute, records = measure(race, models, arguments.accumulate, base)
    links = probed["bandwidths"]
    network = Network(Topology(cluster.world_size, cluster.per_host), **links)
    rows = compare(compute, records, network, "bf16-mixed" if cluster.gpus else "32-true")
    report = {
        "setup": race.setup, "links_bytes_per_s": links, "samples": probed["samples"], "micro_batch_s": compute,
        "rows": rows,
    }  # fmt: skip
    save(report, out)
    show(report)


if __name__ == "__main__":
    main()
