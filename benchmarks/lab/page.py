"""The generated parts of docs/performance.md, and its pictures, from whatever JSON is in results/.

python -m benchmarks.lab.page
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import cpu_hosts, even
from benchmarks.lab.bars import FASTER, SETTINGS
from benchmarks.lab.cluster import ROOT
from benchmarks.lab.contestants import CONTESTANTS, HSDP, partitions
from benchmarks.lab.moves import ALGORITHMS
from benchmarks.lab.pictures import draw_collectives, draw_phases, draw_scaling, draw_table
from benchmarks.lab.report import RESULTS, left_out
from benchmarks.lab.tracing import PHASES, growth

__all__ = ["pictures", "read", "render"]

PAGE = ROOT / "docs" / "performance.md"
PICTURES = PAGE.parent / "pictures"

RACES = {"uneven": list(CONTESTANTS), "even": even.PAIRS, "cpu_hosts": cpu_hosts.NAMES}
"""Scripts that race, and whom each would run."""

STEADY = 0.1
"""How far, relatively, the scouting and the repeats of one configuration may be apart without being named."""

PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Report = dict[str, Any]


def render(page: str, reports: dict[str, Report]) -> str:
    """The page with every part between markers made anew.

    Args:
        page: Its present text.
        reports: What was measured, by the name of the script.
    """

    def part(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in reports:
            return f"{begin}\nNot measured yet: there is no `benchmarks/results/{name}.json`.\n\n{end}"
        lines = _race(name, reports[name]) if name in RACES else OTHERS[name][0](reports[name], name)
        return f"{begin}\n" + "\n".join(lines).rstrip("\n") + f"\n\n{end}"

    return re.sub(r"\n{3,}", "\n\n", PART.sub(part, page))


def pictures(reports: dict[str, Report]) -> dict[str, tuple[Callable[[Any, Path], None], Any]]:
    """How each picture is drawn, and from what, by file name."""
    drawn: dict[str, tuple[Callable[[Any, Path], None], Any]] = {}
    for name, report in reports.items():
        if name in RACES:
            tables = [table for part in report["setups"] for table in part["tables"]]
            drawn |= {_picture(name, number): (draw_table, table) for number, table in enumerate(tables, start=1)}
    for name, (_, draw) in OTHERS.items():
        if name in reports:
            drawn[f"{name}.png"] = (draw, reports[name])
    return drawn


def read(results: Path = RESULTS) -> dict[str, Report]:
    """What was measured, by the name of the script."""
    paths = {name: results / f"{name}.json" for name in (*RACES, *OTHERS)}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def _picture(name: str, number: int) -> str:
    return f"{name}-{number}.png"


# ---- parts ---------------------------------------------------------------------------------------------------


def _race(name: str, report: Report) -> Iterator[str]:
    number = 0
    for part in report["setups"]:
        setup = part["setup"]
        yield from (f"### {_where(setup)}", "", _setup(setup), "")
        for table in part["tables"]:
            number += 1
            rows = {row["contestant"]: row for row in table["rows"]}
            yield from (f"#### {table['model']}, s = {table['accumulate']}", "")
            yield from (*_rows(table["rows"]), "")
            picture = f"pictures/{_picture(name, number)}"
            yield from (f"![Step times of {table['model']}, s = {table['accumulate']}]({picture})", "")
            if any(bar["value"] is not None for bar in table["bars"]):
                yield from (*_bars(table["bars"]), "")
            remarks = (_limits(setup, rows), _memory(rows), _unsteady(rows), _absent(RACES[name], table, part))
            yield from (f"* {line}" for line in chain(*remarks))
            yield ""
        yield from (f"* {line[0].upper()}{line[1:]}." for line in left_out(part["not_measured"]))
        yield ""
    if name == "uneven":
        yield from _yet_to_measure(report)


def _yet_to_measure(report: Report) -> Iterator[str]:
    there = {
        (table["model"], table["accumulate"], part["setup"]["hosts"], part["setup"]["gpus"])
        for part in report["setups"]
        for table in part["tables"]
    }
    missed = [f"{m}, s = {s}, {h} hosts on {g} GPUs" for m, s, h, g in SETTINGS if (m, s, h, g) not in there]
    if missed:
        yield f"Settings that have bars and were not measured yet: {'; '.join(missed)}."


def _where(setup: dict[str, Any]) -> str:
    hosts = f"{setup['hosts']} host{'s' * (setup['hosts'] > 1)} × {setup['ranks_per_host']} ranks"
    return f"{hosts}, {setup['gpus']} GPUs" if setup["gpus"] else f"{hosts}, no GPU"


def _setup(setup: dict[str, Any]) -> str:
    told = [setup["device"]]
    if setup["hosts"] > 1 and "network" in setup:
        told.append(f"between hosts: {setup['network']}")
    told.append(", ".join(f"{name} {version}" for name, version in setup["versions"].items()))
    if "races" in setup:
        told.append("one run" if setup["races"] == 1 else f"{setup['races']} runs")
    return "; ".join(told) + "."


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contestant": lambda row: (
            f"**{row['contestant']}**" if row["contestant"] in partitions() else row["contestant"]
        ),
        "blocks": lambda row: str(row["blocks"]),
        "s/step": lambda row: f"{row['step_s']:.3f}",
        "range": _range,
        "× FULL_SHARD": lambda row: _ratio(row, "times_full_shard"),
        "× best HSDP": lambda row: _ratio(row, "times_best_hsdp"),
        "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "",
        "accumulator": lambda row: row["accumulator"],
        "loss": lambda row: f"{row['loss']:.4f}" if row["loss"] else "",
    }
    cells = {title: [make(row) for row in rows] for title, make in columns.items()}
    return _table({title: column for title, column in cells.items() if any(column)})


def _name(row: dict[str, Any]) -> str:
    name: str = row["contestant"]
    return f"**{name}**" if name in partitions() else name


def _range(row: dict[str, Any]) -> str:
    if row["repeats"] > 1:
        return f"{row['range_s'][0]:.3f} … {row['range_s'][1]:.3f}"
    return "one repeat" if row["repeats"] else "scouting"


def _ratio(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if row[key] and row["loss"] else ""  # legs train nothing


def _bars(bars: list[dict[str, Any]]) -> list[str]:
    return _table({
        "bar": [bar["text"] for bar in bars],
        "needed": [f"{'≥' if bar['at_least'] else '≤'} {bar['needed']}" for bar in bars],
        "measured": ["" if bar["value"] is None else f"{bar['value']:.3f}" for bar in bars],
        "": [_verdict(bar) for bar in bars],
    })  # fmt: skip


def _verdict(bar: dict[str, Any]) -> str:
    if bar["value"] is None:
        return "not measured"
    percent = 100 * abs(bar["value"] / bar["needed"] - 1)
    return f"{'reached' if bar['reached'] else '**missed**'} by {percent:.{0 if percent >= 10 else 1}f} %"


def _limits(setup: dict[str, Any], rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How far it is to what the floor and the legs allow, and whether a bar lies beyond that."""
    mine = [rows[name] for name in rows if name in partitions()]  # fastest first
    if not (mine and setup["gpus"] and "floor" in rows and "legs" in rows):
        return  # without GPUs the two overlap, and their sum is no limit
    floor, legs = rows["floor"]["step_s"], rows["legs"]["step_s"]
    limit = floor + legs
    shown = list({row["contestant"]: row for row in (mine[0], rows.get("paro_iig", mine[0]))}.values())
    told = ", ".join(f"{r['contestant']} takes {r['step_s']:.3f} s, {r['step_s'] / limit:.2f} of it" for r in shown)
    yield f"Floor {floor:.3f} s + legs {legs:.3f} s = {limit:.3f} s; {told}."
    launches = [f"{r['contestant']} {r['more']['launches']}" for r in shown if "launches" in r["more"]]
    if launches:
        yield f"Collectives a step: {', '.join(launches)}."
    peers = [rows[name] for name in rows if name in HSDP]
    _, needed = FASTER.get((setup["hosts"], setup["gpus"]), (0.0, 0.0))
    if needed and peers and peers[0]["step_s"] / needed < limit:
        peer, goal = peers[0], peers[0]["step_s"] / needed
        alone = peer["scouted_s"].get("1")
        tried = f" ({alone:.3f} s with one block a unit)" if alone and peer["blocks"] != 1 else ""
        best = f"the best HSDP, {peer['contestant']} at {peer['step_s']:.3f} s{tried}"
        yield f"{needed:g} times as fast as {best}, would be {goal:.3f} s: less than floor + legs."


def _memory(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How much of paro_iig's peak the partition decides."""
    row = rows.get("paro_iig")
    if row and row["peak_bytes"]:
        state, peak = (nbytes / 2**20 for nbytes in (row["more"]["state_bytes"], row["peak_bytes"]))
        rest = peak - state
        yield f"paro_iig's peak: {state:.0f} MiB of model state, {rest:.0f} MiB of activations and what is in motion."


def _unsteady(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Whose time in the scouting was not nearly that of its repeats: so much can a time vary within the run."""
    told = []
    for name, row in rows.items():
        scouted = row["scouted_s"].get(str(row["blocks"]))
        if row["repeats"] and scouted and abs(scouted / row["step_s"] - 1) > STEADY:
            told.append(f"{name} {scouted:.3f} s in the scouting, {row['step_s']:.3f} s in the repeats")
    if told:
        yield f"More than {100 * STEADY:.0f} % apart: {'; '.join(told)}."


def _absent(names: Iterable[str], table: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    """Who was not asked to run."""
    setting = (table["model"], table["accumulate"])
    known = {row["contestant"] for row in table["rows"]}
    known |= {job["contestant"] for job in part["not_measured"] if (job["model"], job["accumulate"]) == setting}
    absent = [n for n in names if n not in known and not (table["accumulate"] == 1 and CONTESTANTS[n].differs)]
    if absent:
        yield f"Not run: {', '.join(absent)}."


def _collectives(report: Report, name: str) -> Iterator[str]:
    for part in report["setups"]:
        rows = {(row["operation"], row["nbytes"]): row for row in part["rows"]}
        operations, sizes = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
        yield from (f"### {_where(part['setup'])}", "", _setup(part["setup"]), "")
        cells = {"MiB": [f"{size / 2**20:g}" for size in sizes]}
        cells |= {what: [_pair(rows.get((what, size))) for size in sizes] for what in operations}
        yield from (*_table(cells), "")
        unequal = [f"{what} of {size / 2**20:g} MiB" for (what, size), row in rows.items() if not row["equal"]]
        yield from (f"Results of both differ: {', '.join(unequal)}." if unequal else "Results of both are equal.", "")
    yield f"![How many times as fast two levels are as one](pictures/{name}.png)"


def _pair(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    flat, levels = (1000 * row[algorithm]["median_s"] for algorithm in ALGORITHMS)
    return f"{flat:.2f} / {levels:.2f} = {row['speedup']:.2f}"


def _scaling(report: Report, name: str) -> Iterator[str]:
    rows = report["rows"]
    yield from (f"### {_where(report['setup'])}", "", _setup(report["setup"]), "")
    links = {link: value for link, value in report["links_bytes_per_s"].items() if value}
    told = ", ".join(f"{link} {value / 1e9:.3g} GB/s" for link, value in links.items())
    compute = ", ".join(f"{model} {1000 * seconds:.1f} ms" for model, seconds in report["micro_batch_s"].items())
    yield from (f"The planner was told: {told}; a micro-batch of {compute}.", "")
    yield from _table({
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


def _trace(report: Report, name: str) -> Iterator[str]:
    yield from (f"### {_where(report['setup'])}", "", _setup(report["setup"]), "")
    blocks = f"{report['blocks']} block{'s' * (report['blocks'] > 1)} a launch"
    yield from (f"#### {report['model']}, s = {report['accumulate']}, {blocks}", "")
    phases = [phase for phase in PHASES if all(phase in parts for parts in report["phases_s"].values())]
    yield from _table({
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


def _table(columns: dict[str, list[str]]) -> list[str]:
    lines = [list(columns), ["---"] * len(columns), *(list(row) for row in zip(*columns.values(), strict=True))]
    return [f"| {' | '.join(cells)} |" for cells in lines]


OTHERS: dict[str, tuple[Callable[[Report, str], Iterator[str]], Callable[[Any, Path], None]]] = {
    "collectives": (_collectives, draw_collectives),
    "cpu_collectives": (_collectives, draw_collectives),
    "scaling": (_scaling, draw_scaling),
    "cpu_scaling": (_scaling, draw_scaling),
    "trace": (_trace, draw_phases),
}
"""What else is measured: how it is told and drawn."""


def main() -> None:
    reports = read()
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), reports), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    for name, (draw, data) in pictures(reports).items():
        draw(data, PICTURES / name)


if __name__ == "__main__":
    main()
