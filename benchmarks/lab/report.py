"""Tables and JSON of what a race measured; several races of one setup can be joined.

python -m benchmarks.lab.report --out benchmarks/results/uneven.json first.jsonl second.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lab.bars import Bar, best, even_bars, uneven_bars
from benchmarks.lab.cluster import ROOT
from benchmarks.lab.contestants import HSDP, partitions
from benchmarks.lab.rows import Row, rows_of
from benchmarks.lab.schedule import Job, Record

__all__ = ["RESULTS", "left_out", "make_report", "publish", "read", "result", "save", "save_whole", "show"]

RESULTS = ROOT / "benchmarks" / "results"


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The setup and the records that a race wrote down."""
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [Record(**(line | {"job": Job(**line["job"]), "seconds": tuple(line["seconds"])})) for line in lines]
    return head["setup"], records


def make_report(races: Iterable[tuple[dict[str, Any], list[Record]]]) -> dict[str, Any]:
    """Everything that the JSON says: by setup, a table for each model and number of micro-batches."""
    setups: list[tuple[dict[str, Any], list[Record], int]] = []
    for setup, records in races:
        for index, (known, before, count) in enumerate(setups):
            if known == setup:
                setups[index] = (known, before + records, count + 1)
                break
        else:
            setups.append((setup, records, 1))
    return {"setups": [_setup(*joined) for joined in setups]}


def _setup(setup: dict[str, Any], records: list[Record], races: int) -> dict[str, Any]:
    tables = []
    for model, accumulate in dict.fromkeys((r.job.model, r.job.accumulate) for r in records if r.status == "ok"):
        rows = rows_of(records, model, accumulate)
        full = {name: row for name, row in rows.items() if row.repeats}
        even = setup["hosts"] == 1
        bars = even_bars(full) if even else uneven_bars(full, model, accumulate, setup["hosts"], setup["gpus"])
        tables.append({
            "model": model, "accumulate": accumulate, "rows": [_told(row, rows) for row in rows.values()],
            "bars": [asdict(bar) | {"reached": bar.reached} for bar in bars],
        })  # fmt: skip
    failed = [asdict(record.job) | {"status": record.status} for record in records if record.status != "ok"]
    return {"setup": setup | {"races": races}, "tables": tables, "not_measured": failed}


def _told(row: Row, rows: dict[str, Row]) -> dict[str, Any]:
    full, hsdp = rows.get("fsdp_full"), best(rows, HSDP)
    return asdict(row) | {
        "times_full_shard": full and full.step_s / row.step_s,
        "times_best_hsdp": hsdp and hsdp.step_s / row.step_s,
    }


def result(name: str, gpus: int) -> Path:
    """Where the results of a script go: those of a trial without GPUs not in the place of those that are committed."""
    return RESULTS / (f"{name}.json" if gpus else f"{name}-trial.json")


def save(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def save_whole(report: dict[str, Any], path: Path) -> None:
    """Write a report so that a go that is cut off leaves the one before."""
    part = path.with_suffix(".part")
    save(report, part)
    part.replace(path)


def show(report: dict[str, Any]) -> None:
    """Print every table, its bars, and what was not measured."""
    console = Console(width=160)
    for part in report["setups"]:
        setup = part["setup"]
        hosts, gpus = f"{setup['hosts']} hosts x {setup['ranks_per_host']}", f"{setup['gpus'] or 'no'} GPUs"
        where = f"{hosts}, {gpus}, {setup['device']}; {setup['network']}"
        for table in part["tables"]:
            console.print(_table(f"{table['model']}, s={table['accumulate']}: {where}", table["rows"]))
            for bar in table["bars"]:
                console.print(_line(Bar(*(bar[key] for key in ("text", "value", "needed", "at_least")))))
        for line in left_out(part["not_measured"]):
            console.print(line, style="yellow")


def left_out(jobs: list[dict[str, Any]]) -> Iterator[str]:
    """One line a contestant, with the reason of its first job."""
    by_row: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for job in jobs:
        by_row.setdefault((job["model"], job["accumulate"], job["contestant"]), []).append(job)
    for (model, accumulate, name), missed in by_row.items():
        which = ", ".join(f"repeat {j['repeat']}" if j["repeat"] else f"blocks={j['blocks']}" for j in missed)
        yield f"not measured: {model} s={accumulate} {name} ({which}): {missed[0]['status']}"


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    table.add_column("contestant")
    for column in ("blocks", "s/step", "range", "x FULL", "x HSDP", "peak MiB", "accumulator", "loss", "repeats"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["contestant"], str(row["blocks"]), f"{row['step_s']:.3f}",
            f"{row['range_s'][0]:.3f} .. {row['range_s'][1]:.3f}", _ratio(row["times_full_shard"]),
            _ratio(row["times_best_hsdp"]), f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "",
            row["accumulator"], f"{row['loss']:.4f}" if row["loss"] else "", str(row["repeats"] or "scouting"),
            style="bold" if row["contestant"] in partitions() else "",
        )  # fmt: skip
    return table


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value else ""


def _line(bar: Bar) -> str:
    sign = ">=" if bar.at_least else "<="
    if bar.value is None:
        return f"[yellow]not known[/]  {bar.text}: {sign} {bar.needed}"
    return (
        f"{'[green]reached[/]' if bar.reached else '[red]missed[/] '}  {bar.text}: {bar.value:.3f} {sign} {bar.needed}"
    )


def publish(races: Iterable[tuple[dict[str, Any], list[Record]]], out: Path) -> dict[str, Any]:
    """The table on the terminal, and JSON at ``out``."""
    report = make_report(races)
    save(report, out)
    show(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("races", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    publish([read(path) for path in arguments.races], arguments.out)


if __name__ == "__main__":
    main()
