"""How everything that is not a race is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.lab.moves import ALGORITHMS
from benchmarks.lab.text import setup_line, table, where
from benchmarks.lab.tracing import PHASES, growth

__all__ = ["tell_collectives", "tell_guideline", "tell_one_sided", "tell_scaling", "tell_trace"]

Report = dict[str, Any]


def tell_collectives(report: Report, name: str) -> Iterator[str]:
    """A table for each cluster: sizes down, operations across."""
    for part in report["setups"]:
        rows = {(row["operation"], row["nbytes"]): row for row in part["rows"]}
        operations, sizes = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
        yield from (f"### {where(part['setup'])}", "", setup_line(part["setup"]), "")
        cells = {"MiB": [f"{size / 2**20:g}" for size in sizes]}
        cells |= {what: [_pair(rows.get((what, size))) for size in sizes] for what in operations}
        yield from (*table(cells), "")
        unequal = [f"{what} of {size / 2**20:g} MiB" for (what, size), row in rows.items() if not row["equal"]]
        yield from (f"Results of both differ: {', '.join(unequal)}." if unequal else "Results of both are equal.", "")
    yield f"![How many times as fast two levels are as one](pictures/{name}.png)"


def tell_scaling(report: Report, name: str) -> Iterator[str]:
    """What the planner was told, and its predictions beside what was measured."""
    rows = report["rows"]
    yield from (f"### {where(report['setup'])}", "", setup_line(report["setup"]), "")
    links = {link: value for link, value in report["links_bytes_per_s"].items() if value}
    told = ", ".join(f"{link} {value / 1e9:.3g} GB/s" for link, value in links.items())
    compute = ", ".join(f"{model} {1000 * seconds:.1f} ms" for model, seconds in report["micro_batch_s"].items())
    yield from (f"The planner was told: {told}; a micro-batch of {compute}.", "")
    yield from table({
        "contestant": [row["contestant"] for row in rows],
        "model": [row["model"] for row in rows],
        "million parameters": [f"{row['parameters'] / 1e6:.3g}" for row in rows],
        "s": [str(row["accumulate"]) for row in rows],
        "measured s/step": [f"{row['step_s']:.3f}" for row in rows],
        "predicted": [f"{row['predicted_s']:.3f}" for row in rows],
        "error": [f"{row['error']:+.0%}" for row in rows],
        "nothing overlapped": [f"{row['in_turn_s']:.3f}" for row in rows],
    })  # fmt: skip
    yield ""
    yield f"![Cost against the size of the model and against s, measured and predicted](pictures/{name}.png)"


def tell_guideline(report: Report, name: str) -> Iterator[str]:
    """Predictions beside what was measured, partition by partition, and what choosing by them costs."""
    for setting in report["settings"]:
        rows = setting["rows"]
        yield from (f"### {setting['model']}, s = {setting['accumulate']}, {where(report['setup'])}", "")
        yield from table({
            "partition": [row["partition"] for row in rows],
            "measured s/step": [f"{row['measured_s']:.3f}" for row in rows],
            "predicted": [f"{row['predicted_s']:.3f}" for row in rows],
            "error": [f"{row['error']:+.0%}" for row in rows],
            "peak MiB": [f"{row['peak_bytes'] / 2**20:.0f}" for row in rows],
            "predicted without activations": [f"{row['predicted_bytes'] / 2**20:.0f}" for row in rows],
        })  # fmt: skip
        choices = setting["choices"]
        yield ""
        yield from table({
            "memory from, MiB": [f"{choice['from_bytes'] / 2**20:.0f}" for choice in choices],
            "chosen": [choice["chosen"] for choice in choices],
            "fastest": [choice["fastest"] for choice in choices],
            "costs": [f"{choice['costs']:.0%}" for choice in choices],
        })  # fmt: skip
        yield ""
    yield f"![Predicted against measured seconds of a step](pictures/{name}.png)"


def tell_one_sided(report: Report, name: str) -> Iterator[str]:
    """Gathers by collectives and by copies, alone and beside a computation."""
    for part in report["setups"]:
        setup, rows = part["setup"], part["rows"]
        yield from (f"### {where(setup)}", "", setup_line(setup), "")
        yield from table({
            "MiB": [f"{row['mebibytes']}" for row in rows],
            "all-gather, ms": [f"{1000 * row['collective']['alone_s']:.2f}" for row in rows],
            "copies": [f"{1000 * row['copies']['alone_s']:.2f}" for row in rows],
            "computation alone, ms": [f"{1000 * row['computation_s']:.2f}" for row in rows],
            "beside 8 all-gathers": [f"{1000 * row['collective']['beside_s']:.2f}" for row in rows],
            "beside 8 times the copies": [f"{1000 * row['copies']['beside_s']:.2f}" for row in rows],
        })  # fmt: skip
        wrong = [f"{row['mebibytes']} MiB" for row in rows if not row["equal"]]
        yield from ("", f"Results differ: {', '.join(wrong)}." if wrong else "Results of both are equal.", "")
    yield f"![A computation beside gathers of both kinds](pictures/{name}.png)"


def tell_trace(report: Report, name: str) -> Iterator[str]:
    """Parts of a step, waits of the host, and memory that stays."""
    yield from (f"### {where(report['setup'])}", "", setup_line(report["setup"]), "")
    blocks = f"{report['blocks']} block{'s' * (report['blocks'] > 1)} a launch"
    yield from (f"#### {report['model']}, s = {report['accumulate']}, {blocks}", "")
    phases = [phase for phase in PHASES if all(phase in parts for parts in report["phases_s"].values())]
    yield from table({
        "ms of a step": phases,
        **{who: [f"{1000 * parts[phase]:.1f}" for phase in phases] for who, parts in report["phases_s"].items()},
    })  # fmt: skip
    yield ""
    for who, found in report["traces"].items():
        waits = ", ".join(f"{count} a step at {where}" for where, count in found["synchronisations"].items())
        yield f"* {who}: {found['launches']} collectives a step; the host waits for the device {waits or 'nowhere'}."
        if found["reserved"]:
            grown = growth(found["reserved"])
            since = report["steps"] // 10
            yield f"* {who}: memory reserved grew by {grown} bytes from step {since} to {report['steps']};"
            yield f"  {found['left_bytes']} bytes were left after teardown."
    yield ""
    yield f"![Where the time of a step goes](pictures/{name}.png)"


def _pair(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    flat, levels = (1000 * row[algorithm]["median_s"] for algorithm in ALGORITHMS)
    return f"{flat:.2f} / {levels:.2f} = {row['speedup']:.2f}"
