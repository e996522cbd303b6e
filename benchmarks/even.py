"""An even network: two GPUs of one host, where this package has to be no slower than torch's own, and no larger.

Three pairs hold and move the same: paro_ggg and fully_shard, paro_nng and DDP with ZeroRedundancyOptimizer, paro_nnn
and DDP::

    python benchmarks/even.py --model gpt2-medium llama-1b
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lab.cluster import Cluster
from benchmarks.lab.models import MODELS
from benchmarks.lab.report import publish, result
from benchmarks.lab.schedule import Race

PAIRS = ["floor", "paro_ggg", "fully_shard_1d", "paro_nng", "ddp_zero", "paro_nnn", "ddp"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, choices=(0, 2), help="0 is the CPU")
    parser.add_argument("--model", nargs="+", default=["gpt2-medium", "llama-1b"], choices=MODELS)
    parser.add_argument("--accumulate", nargs="+", type=int, default=[8])
    parser.add_argument("--only", nargs="+", default=PAIRS, choices=PAIRS, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3600, help="seconds; what does not fit is left out and named")
    parser.add_argument("--out", type=Path, help="results/even.json, or without GPUs even-trial.json")
    arguments = parser.parse_args()
    out = arguments.out or result("even", arguments.gpus)
    with Cluster(hosts=1, per_host=2, gpus=arguments.gpus) as cluster:
        race = Race(cluster, arguments.limit, out.with_suffix(".jsonl"))
        race.run(arguments.only, arguments.model, arguments.accumulate, arguments.repeats)
    publish([(race.setup, race.records)], out)


if __name__ == "__main__":
    main()
