"""Uneven hosts: every partition beside its peers, where links inside a host are fast and those between hosts slow.

Two or four GPUs pose as hosts of two ranks. All contestants do the same work from the same weights: bf16 compute, fp32
master weights, AdamW, clipping by the global norm; each with its best of 1, 2 and 4 blocks a unit::

    python benchmarks/uneven.py --hosts 2 --gpus 2 --model gpt2-medium --accumulate 1 8
    python benchmarks/uneven.py --hosts 4 --gpus 2 --accumulate 8 --only floor legs paro_iig fsdp_full --limit 500
    python benchmarks/uneven.py --gpus 0 --model tiny-gpt2 --repeats 1      # no GPU: does everything run?

Each job is written to a file of JSON lines as soon as it is done, so a run that is ended keeps what it has;
``python -m benchmarks.lab.report`` makes the table and JSON of one or several such files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab.cluster import Cluster
from benchmarks.lab.contestants import CONTESTANTS
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import publish, result
from benchmarks.lab.schedule import Race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 2, 4), help="0 is the CPU")
    parser.add_argument("--model", nargs="+", default=["gpt2-medium"], choices=MODELS)
    parser.add_argument("--accumulate", nargs="+", type=int, default=[8])
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600, help="seconds; what does not fit is left out and named")
    parser.add_argument("--out", type=Path, help="results/uneven.json, or without GPUs uneven-trial.json")
    arguments = parser.parse_args()
    out = arguments.out or result("uneven", arguments.gpus)
    with Cluster(arguments.hosts, per_host=2, gpus=arguments.gpus) as cluster:
        race = Race(cluster, arguments.limit, out.with_suffix(".jsonl"))
        race.run(arguments.only, arguments.model, arguments.accumulate, arguments.repeats)
    publish([(race.setup, race.records)], out)


if __name__ == "__main__":
    main()
