"""PaRO-CC: collectives in two levels against flat ones, the backend's own over all ranks, from 1 MiB to 1 GiB.

Two or four GPUs pose as hosts of two ranks, as in uneven.py; both algorithms run in turn, and a time is that of the
slowest rank. Two levels use the chunk sizes that ``tune`` measures first::

    python benchmarks/collectives.py --hosts 2 4
    sudo .venv/bin/python benchmarks/collectives.py --mbit 100 --hosts 2 3 --sizes 1 4 16   # no GPU: as in cpu_hosts.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import namespaces
from benchmarks.lab.cluster import Cluster, described
from benchmarks.lab.moves import ALGORITHMS, OPERATIONS
from benchmarks.lab.report import result, save

MIB = 2**20
WARMUP, MEASURED = 2, 5


def race(place: AbstractContextManager[Cluster], operations: list[str], sizes: list[int]) -> dict[str, Any]:
    """Every operation at every size on one cluster."""
    rows = []
    with place as cluster:
        setup = described(cluster)
        tried = sorted(sizes)[-3:]  # chunks matter where there are many
        chunks = cluster.call("benchmarks.lab.moves:tuned", nbytes=tried)[0]
        setup["chunk_bytes"] = {name: dict(zip(map(str, tried), best, strict=True)) for name, best in chunks.items()}
        for operation in operations:
            for nbytes in sizes:
                options: dict[str, Any] = {
                    "operation": operation,
                    "nbytes": nbytes,
                    "warmup": WARMUP,
                    "measured": MEASURED,
                }
                ranks = cluster.call("benchmarks.lab.moves:measure", **options)
                row: dict[str, Any] = {"operation": operation, "nbytes": nbytes}
                for algorithm in ALGORITHMS:
                    steps = [max(step) for step in zip(*(r["seconds"][algorithm] for r in ranks), strict=True)]
                    row[algorithm] = {"median_s": statistics.median(steps), "range_s": [min(steps), max(steps)]}
                row["speedup"] = row["flat"]["median_s"] / row["two-level"]["median_s"]
                row["equal"] = all(rank["equal"] for rank in ranks)
                rows.append(row)
                what = f"{cluster.world_size} ranks, {operation}, {nbytes / MIB:g} MiB"
                print(f"{what}: {row['speedup']:.2f} times as fast")
    return {"setup": setup, "rows": rows}


def show(report: dict[str, Any]) -> None:
    for part in report["setups"]:
        setup = part["setup"]
        table = Table(title=f"{setup['hosts']} hosts x {setup['ranks_per_host']}, {setup['device']}")
        for column in ("operation", "MiB", "flat ms", "two-level ms", "times as fast", "equal"):
            table.add_column(column, justify="right")
        for row in part["rows"]:
            times = [f"{1000 * row[algorithm]['median_s']:.2f}" for algorithm in ALGORITHMS]
            told = [row["operation"], f"{row['nbytes'] / MIB:g}", *times, f"{row['speedup']:.2f}", str(row["equal"])]
            table.add_row(*told)
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="posed hosts of two ranks")
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 2, 4), help="0 is the CPU")
    parser.add_argument("--mbit", type=int, help="hosts are network namespaces with links of this rate, without GPUs")
    parser.add_argument("--only", nargs="+", default=list(OPERATIONS), choices=OPERATIONS, metavar="OPERATION")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**k for k in range(11)], metavar="MIB")
    parser.add_argument("--out", type=Path, help="results/collectives.json, or without GPUs collectives-trial.json")
    arguments = parser.parse_args()
    mbit, gpus = arguments.mbit, arguments.gpus
    out = arguments.out or result("collectives", 0 if mbit else gpus)
    report: dict[str, Any] = {"setups": []}
    for hosts in arguments.hosts:
        place = namespaces.cluster(hosts, mbit) if mbit else Cluster(hosts, per_host=2, gpus=gpus)
        report["setups"].append(race(place, arguments.only, [size * MIB for size in arguments.sizes]))
        save(report, out)
    show(report)


if __name__ == "__main__":
    main()
