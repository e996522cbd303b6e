"""What is learnt by LISA, LoRA and full fine-tuning of a small language model, from the text of the standard library.

The protocol, fixed beforehand, stands in `lab/learning_arms.py`. On one CPU core in twenty minutes, or on a GPU::

    OMP_NUM_THREADS=1 python -m benchmarks.lisa_learning --shape small --device cpu
    python -m benchmarks.lisa_learning --shape gpt2-small --device cuda

Rows are written one by one, beside the JSON, and the pre-trained weights into checkpoints/: what is there already is
not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import lightning
import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.lab.cluster import ROOT
from benchmarks.lab.learning_arms import STUDIES, Run, final, remaining
from benchmarks.lab.learning_page import summaries
from benchmarks.lab.learning_runs import Lab
from benchmarks.lab.report import RESULTS, save

NAMES = {"small": "lisa_learning", "gpt2-small": "lisa_learning_gpt2"}


def setup_of(lab: Lab) -> dict[str, Any]:
    """What all rows share."""
    study = lab.study
    return {
        "shape": lab.shape, "device": torch.cuda.get_device_name() if lab.device == "cuda" else lab.device,
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "lightning": lightning.__version__, "transformers": transformers.__version__,
                     "peft": peft.__version__},
        "length": study.length, "pretraining": list(study.pretraining), "tuning": list(study.tuning),
        "held_out": study.held_out, "rates": list(study.rates), "start": lab.digest,
    }  # fmt: skip


def earlier(path: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of runs that were cut off; if there are none, the file is begun.

    Raises:
        SystemExit: If those are of another setup.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(setup) + "\n")
        return []
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    differing = [key for key in setup if head.get(key) != setup[key]]
    if differing:
        told = "; ".join(f"{key} {head.get(key)} there, {setup[key]} here" for key in differing)
        raise SystemExit(f"the rows in {path} are of another setup: {told}. HINT: move that file away.")
    return rows


def measure(lab: Lab, path: Path) -> dict[str, Any]:
    """Run what has no row yet."""
    setup = setup_of(lab)
    rows = earlier(path, setup)
    while todo := list(remaining(lab.study, rows)):
        for run in todo:
            row: dict[str, Any] = json.loads(json.dumps(lab.run(run)))
            rows.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(told(run, row), flush=True)
    return {"setup": setup, "rows": rows}


def told(run: Run, row: dict[str, Any]) -> str:
    return f"{run.arm.name}, rate {run.lr:g}, seed {run.seed}: {final(row):.4f}"


def show(report: dict[str, Any]) -> None:
    table = Table("arm", "rate", "held-out loss", "range", title=f"{report['setup']['shape']}, nats a byte")
    for summary in summaries(report):
        spread = "{:.4f} .. {:.4f}".format(*summary.range)
        table.add_row(summary.arm.name, f"{summary.lr:g}", f"{summary.mean:.4f}", spread)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(STUDIES), default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="default: results/lisa_learning.json, lisa_learning_gpt2.json")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"{NAMES[arguments.shape]}.json"
    lab = Lab(arguments.shape, STUDIES[arguments.shape], arguments.device, ROOT / "checkpoints")
    report = measure(lab, out.with_suffix(".jsonl"))
    save(report, out)
    show(report)


if __name__ == "__main__":
    main()
