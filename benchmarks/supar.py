"""SμPar beside SP and μP: how large activations are at every density, in the first steps, ten seeds.

A few minutes each on two CPU cores::

    python -m benchmarks.supar coords --model perceptron --widths 1024
    python -m benchmarks.supar coords --model llama --widths 256
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lab.lisa_runs import setup_of
from benchmarks.lab.report import RESULTS, save
from benchmarks.lab.supar_models import MODELS, Writer, text
from lightning_paro.experiments import CoordReport, coord_check

DENSITIES = tuple(2.0**-power for power in range(7))


def rows_of(found: CoordReport) -> list[dict[str, Any]]:
    """Means over seeds: a row a parameterization, width, density and module, with its values by step."""
    rows: dict[tuple[str, int, float, str], list[float]] = {}
    for (kind, width, density, module, _), value in sorted(found.means().items(), key=lambda each: each[0][4]):
        rows.setdefault((kind, width, density, module), []).append(float(f"{value:.5g}"))
    names = ("parameterization", "width", "density", "module")
    return [{**dict(zip(names, key, strict=True)), "values": values} for key, values in rows.items()]


def coords(arguments: argparse.Namespace) -> None:
    name, subject = arguments.model, MODELS[arguments.model]
    found = coord_check(
        functools.partial(Writer, name), text(arguments.steps), widths=arguments.widths, densities=DENSITIES,
        seeds=range(arguments.seeds), steps=arguments.steps, accelerator=arguments.device,
    )  # fmt: skip
    Console(width=160).print(found)
    part = {
        "setup": setup_of(arguments.device.replace("gpu", "cuda")), "model": name, "widths": arguments.widths,
        "base": subject.base, "lr": subject.lr, **subject.plan, "seeds": arguments.seeds, "steps": arguments.steps,
        "rows": rows_of(found),
    }  # fmt: skip
    before = json.loads(arguments.out.read_text())["parts"] if arguments.out.exists() else []
    others = [other for other in before if any(other[key] != part[key] for key in ("model", "widths"))]
    save({"parts": [*others, part]}, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("coords", help="activations by parameterization, width, density and step")
    check.add_argument("--model", choices=MODELS, default="perceptron")
    check.add_argument("--widths", nargs="+", type=int, default=[1024], metavar="WIDTH")
    check.add_argument("--seeds", type=int, default=10)
    check.add_argument("--steps", type=int, default=10)
    check.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    check.add_argument("--out", type=Path, default=RESULTS / "supar_coords.json")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="an output of")  # sparser than the rules are known to hold for
    {"coords": coords}[arguments.command](arguments)


if __name__ == "__main__":
    main()
