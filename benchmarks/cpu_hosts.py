"""Uneven hosts without any GPU: network namespaces of one Linux machine, with a slow link between them.

Two ranks a host compute with one thread each and talk over gloo: inside a host at the speed of memory, between hosts at
100 Mbit/s. Needs root and iproute2; without them everything runs over loopback, where there is no slow link to see::

    sudo python benchmarks/cpu_hosts.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab import namespaces
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import publish, result
from benchmarks.lab.schedule import Race

NAMES = ["floor", "legs", "paro_nig", "paro_iig", "paro_igg", "paro_ggg", "ddp", "ddp_zero"]
NAMES += ["fsdp_full", "fsdp_hybrid", "fully_shard_1d", "fully_shard_2d"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--mbit", type=int, default=100, help="of the link of each host, each way")
    parser.add_argument("--model", default="cpu-gpt2", choices=MODELS)
    parser.add_argument("--accumulate", nargs="+", type=int, default=[4])
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for each number of hosts")
    parser.add_argument("--out", type=Path, default=result("cpu_hosts", gpus=0))
    arguments = parser.parse_args()
    races = []
    for count in arguments.hosts:
        with namespaces.cluster(count, arguments.mbit) as cluster:
            race = Race(cluster, arguments.limit, arguments.out.with_suffix(f".{count}.jsonl"))
            race.run(arguments.only, [arguments.model], arguments.accumulate, arguments.repeats)
        races.append((race.setup, race.records))
    publish(races, arguments.out)


if __name__ == "__main__":
    main()
