"""Gathers inside a host: NCCL's all-gather against copies out of the peers' memory, alone and beside computation.

Tried because copies need no rendezvous and no processors of the GPU. With one rank a GPU, and with two that share it::

    python benchmarks/one_sided.py
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
from benchmarks.lab.one_sided import WAYS
from benchmarks.lab.report import result, save

PIECES = 4
"""Units that a gather brings, as in a bucket."""


def rows_of(cluster: Cluster, mebibytes: list[int]) -> list[dict[str, Any]]:
    """Both ways at every size; the slowest rank counts."""
    rows = []
    for size in mebibytes:
        ranks = cluster.call("benchmarks.lab.one_sided:measure", nbytes=size * 2**20, pieces=PIECES, measured=10)
        row: dict[str, Any] = {"mebibytes": size * PIECES, "computation_s": max(r["computation"] for r in ranks)}
        for way in WAYS:
            row[way] = {f"{what}_s": max(rank[what][way] for rank in ranks) for what in ("alone", "beside")}
        rows.append(row | {"equal": all(rank["equal"] for rank in ranks)})
    return rows


def show(report: dict[str, Any]) -> None:
    for part in report["setups"]:
        setup = part["setup"]
        sharing = setup["hosts"] * setup["ranks_per_host"] // setup["gpus"]
        table = Table(title=f"{setup['device']}, {sharing} rank{'s' * (sharing > 1)} a GPU")
        columns = [*(f"{way} ms" for way in WAYS), "computation ms", *(f"beside 8 {way} ms" for way in WAYS)]
        for column in ("MiB", *columns):
            table.add_column(column, justify="right")
        for row in part["rows"]:
            told = [row[way]["alone_s"] for way in WAYS] + [row["computation_s"]] + [row[w]["beside_s"] for w in WAYS]
            table.add_row(str(row["mebibytes"]), *(f"{1e3 * seconds:.2f}" for seconds in told))
        Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[6, 24, 96], metavar="MIB", help="of each unit")
    parser.add_argument("--out", type=Path, default=result("one_sided", gpus=2))
    arguments = parser.parse_args()
    report: dict[str, Any] = {"setups": []}
    for hosts in (1, 2):
        with Cluster(hosts, per_host=2, gpus=2) as cluster:
            report["setups"].append({"setup": described(cluster), "rows": rows_of(cluster, arguments.sizes)})
        save(report, arguments.out)
    show(report)


if __name__ == "__main__":
    main()
