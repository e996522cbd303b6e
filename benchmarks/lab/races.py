"""How a race is told: its tables, its bars, and remarks on what limits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from benchmarks import cpu_hosts, even
from benchmarks.lab.bars import FASTER, SETTINGS
from benchmarks.lab.contestants import CONTESTANTS, HSDP, partitions
from benchmarks.lab.report import left_out
from benchmarks.lab.text import setup_line, table, where

__all__ = ["RACES", "bars_table", "picture", "tell_race"]

RACES = {"uneven": list(CONTESTANTS), "even": even.PAIRS, "cpu_hosts": cpu_hosts.NAMES}
"""Scripts that race, and whom each would run."""

STEADY = 0.1
"""How far, relatively, the scouting and the repeats of one configuration may be apart without being named."""

Setting = tuple[str, int, int, int]
"""Model, number of micro-batches, hosts and GPUs: what several runs can have in common."""


def picture(name: str, number: int) -> str:
    """File name of the picture of the ``number``-th table of a race."""
    return f"{name}-{number}.png"


def tell_race(report: dict[str, Any], name: str) -> Iterator[str]:
    """Lines about all tables of a race; who and what is in none of the tables of a setting is named at the end."""
    number = 0
    for run, part in enumerate(report["setups"], start=1):
        yield from (f"### Run {run}: {where(part['setup'])}", "", setup_line(part["setup"]), "")
        for one in part["tables"]:
            number += 1
            rows = {row["contestant"]: row for row in one["rows"]}
            title = f"{one['model']}, s = {one['accumulate']}"
            yield from (f"#### {title}", "", *_rows(one["rows"]), "")
            yield from (f"![Step times of {title}](pictures/{picture(name, number)})", "")
            bars = [bar for bar in one["bars"] if bar["value"] is not None]
            if bars:
                yield from (*bars_table(bars), "")
            yield from (f"* {line}" for line in chain(_limits(part["setup"], rows), _memory(rows), _unsteady(rows)))
            yield ""
    missing = list(_missing(report, RACES[name], name == "uneven"))
    if missing:
        yield from ("### Not measured", "", *(f"* {line}" for line in missing))


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "contestant": _name,
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
    return table({title: column for title, column in cells.items() if any(column)})


def _name(row: dict[str, Any]) -> str:
    name: str = row["contestant"]
    return f"**{name}**" if name in partitions() else name


def _range(row: dict[str, Any]) -> str:
    if row["repeats"] > 1:
        return f"{row['range_s'][0]:.3f} … {row['range_s'][1]:.3f}"
    return "one repeat" if row["repeats"] else "scouting"


def _ratio(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if row[key] and row["loss"] else ""  # legs train nothing


def bars_table(bars: list[dict[str, Any]]) -> list[str]:
    return table({
        "bar": [bar["text"] for bar in bars],
        "needed": [f"{'≥' if bar['at_least'] else '≤'} {bar['needed']}" for bar in bars],
        "measured": [f"{bar['value']:.3f}" for bar in bars],
        "": [_verdict(bar) for bar in bars],
    })  # fmt: skip


def _verdict(bar: dict[str, Any]) -> str:
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


def _missing(report: dict[str, Any], names: Iterable[str], has_settings: bool) -> Iterator[str]:
    """Who is in no table of a setting and why, which bars have no value, and which settings no table."""
    known: dict[Setting, set[str]] = {}
    bars: dict[Setting, dict[str, bool]] = {}
    failed: dict[Setting, list[dict[str, Any]]] = {}
    for part in report["setups"]:
        place = (part["setup"]["hosts"], part["setup"]["gpus"])
        for one in part["tables"]:
            setting = (one["model"], one["accumulate"], *place)
            known.setdefault(setting, set()).update(row["contestant"] for row in one["rows"])
            for bar in one["bars"]:
                found = bars.setdefault(setting, {})
                found[bar["text"]] = found.get(bar["text"], False) or bar["value"] is not None
        for job in part["not_measured"]:
            failed.setdefault((job["model"], job["accumulate"], *place), []).append(job)
    for setting, there in known.items():
        jobs = [job for job in failed.get(setting, []) if job["contestant"] not in there]
        yield from (f"{line.removeprefix('not measured: ')}." for line in left_out(jobs))
        tried = there | {job["contestant"] for job in jobs}
        absent = [n for n in names if n not in tried and not (setting[1] == 1 and CONTESTANTS[n].differs)]
        if absent:
            yield f"{_told(setting)}, not run: {', '.join(absent)}."
        yield from (
            f"{_told(setting)}, bar: {text}." for text, is_known in bars.get(setting, {}).items() if not is_known
        )
    if has_settings:
        yield from (f"{_told(setting)}, which has bars." for setting in SETTINGS if setting not in known)


def _told(setting: Setting) -> str:
    model, accumulate, hosts, gpus = setting
    return f"{model}, s = {accumulate}, {hosts} host{'s' * (hosts > 1)} on {f'{gpus} GPUs' if gpus else 'a CPU'}"
