"""SμPar beside SP and μP: activations, learning rates that carry over or do not, and what masks and formats cost.

The protocol, fixed beforehand, stands in `lab/supar_protocol.py`. On two CPU cores, the sweep half an hour::

    python -m benchmarks.supar coords --subject perceptron --widths 1024
    python -m benchmarks.supar coords --subject llama --widths 256
    python -m benchmarks.supar sweep --study hidden_low --workers 2

and on a GPU, with as many processes as keep it busy::

    python -m benchmarks.supar coords --subject gpt-heads-32 --widths 512 1024 2048 --device cuda --workers 8
    python -m benchmarks.supar sweep --study global --device cuda --workers 12
    python -m benchmarks.supar sweep --study iso --device cuda --workers 6
    python -m benchmarks.supar time
    python -m benchmarks.supar formats

What is in the JSON already is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.lab.lisa_runs import setup_of
from benchmarks.lab.report import RESULTS, save_whole
from benchmarks.lab.supar_formats import measure_formats
from benchmarks.lab.supar_protocol import STUDIES, SUBJECTS
from benchmarks.lab.supar_runs import about, check, losses, missing, pool, rows_in
from benchmarks.lab.supar_sweep_page import report_of
from benchmarks.lab.supar_time import measure_time
from lightning_paro.algorithms.supar import Parameterization
from lightning_paro.experiments import CoordReport, Setting

DENSITIES = tuple(2.0**-power for power in range(7))


def rows_of(found: CoordReport) -> list[dict[str, Any]]:
    """Means over seeds: a row a parameterization, width, density and module, with its values by step."""
    rows: dict[tuple[str, int, float, str], list[float]] = {}
    for (kind, width, density, module, _), value in sorted(found.means().items(), key=lambda each: each[0][4]):
        rows.setdefault((kind, width, density, module), []).append(float(f"{value:.5g}"))
    names = ("parameterization", "width", "density", "module")
    return [{**dict(zip(names, key, strict=True)), "values": values} for key, values in rows.items()]


def coords(arguments: argparse.Namespace) -> None:
    name, subject = arguments.subject, SUBJECTS[arguments.subject]
    head = {
        "setup": setup_of(arguments.device), "model": name, "base": subject.base, "lr": subject.lr, **subject.plan,
        "seeds": arguments.seeds, "steps": arguments.steps,
    }  # fmt: skip
    parts = json.loads(arguments.out.read_text())["parts"] if arguments.out.exists() else []
    part = next((part for part in parts if all(part[key] == value for key, value in head.items())), None)
    others = [other for other in parts if other["model"] != name]
    rows = part["rows"] if part is not None else []
    done = {(row["parameterization"], row["width"], row["density"]) for row in rows}
    kinds: tuple[Parameterization, ...] = ("sp", "mup", "supar")
    settings = [
        Setting(kind, width, density, seed)
        for width, density, kind in product(arguments.widths, DENSITIES, kinds) if (kind, width, density) not in done
        for seed in range(arguments.seeds)
    ]  # fmt: skip
    work = functools.partial(check, name, arguments.steps, arguments.device)
    found: dict[tuple[str, int, float], list[Any]] = {}
    for setting, more in track(pool(work, settings, arguments.workers), "coordinate check", total=len(settings)):
        seeds = found.setdefault((setting.parameterization, setting.width, setting.density), [])
        seeds.append(more)
        if len(seeds) == arguments.seeds:
            rows = [*rows, *rows_of(CoordReport([row for of_seed in seeds for row in of_seed]))]
            save_whole({"parts": [*others, {**head, "rows": rows}]}, arguments.out)


def sweep(arguments: argparse.Namespace) -> None:
    name = arguments.study
    out = arguments.out or RESULTS / f"supar_{name}.json"
    head = about(name, setup_of(arguments.device))
    rows = rows_in(out, head)
    todo = missing(STUDIES[name], rows)
    work = functools.partial(losses, name, arguments.device)
    for _, row in track(pool(work, todo, arguments.workers), name, total=len(todo)):
        rows.append(row)
        save_whole({**head, "rows": rows}, out)
    Console(width=160).print(report_of({**head, "rows": rows}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("coords", help="activations by parameterization, width, density and step")
    check.add_argument("--subject", choices=SUBJECTS, default="perceptron")
    check.add_argument("--widths", nargs="+", type=int, default=[1024], metavar="WIDTH")
    check.add_argument("--seeds", type=int, default=10)
    check.add_argument("--steps", type=int, default=10)
    check.add_argument("--out", type=Path, default=RESULTS / "supar_coords.json")
    rates = commands.add_parser("sweep", help="losses by arm, width, density, learning rate and seed")
    rates.add_argument("--study", choices=STUDIES, default="hidden")
    rates.add_argument("--out", type=Path, help="default: results/supar_STUDY.json")
    for command in (check, rates):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--workers", type=int, default=1, help="runs at a time")
    timing = commands.add_parser("time", help="steps and memory of masked and dense training on a GPU")
    timing.add_argument("--out", type=Path, default=RESULTS / "supar_time.json")
    formats = commands.add_parser("formats", help="layers in the formats of the export, shape by shape, on a GPU")
    formats.add_argument("--out", type=Path, default=RESULTS / "supar_formats.json")
    arguments = parser.parse_args()
    verbs = {"coords": coords, "sweep": sweep, "time": measure_time, "formats": measure_formats}
    verbs[arguments.command](arguments)


if __name__ == "__main__":
    main()
