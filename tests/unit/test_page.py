"""The generated parts of docs/performance.md, from results made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.contestants import CONTESTANTS
from benchmarks.lab.guideline import compare
from benchmarks.lab.moves import OPERATIONS
from benchmarks.lab.page import pictures, render
from benchmarks.lab.pictures import digest
from benchmarks.lab.report import make_report
from benchmarks.lab.schedule import Job, Record

GIB = 2**30
SETUP = {
    "device": "Made Up 1", "versions": {"torch": "9.8"}, "hosts": 2, "ranks_per_host": 2, "gpus": 2,
    "network": "a string",
}  # fmt: skip
TIMES = {"floor": (0.5, 6.0), "legs": (0.2, 1.0), "fsdp_full": (4.4, 7.0), "fully_shard_2d": (1.2, 6.5)}
TIMES |= {"paro_iig": (0.8, 6.0), "paro_nig": (0.75, 7.0)}


def record(name: str, seconds: float, peak: float = 1.0, repeat: int = 1, blocks: int = 4, **more: Any) -> Record:
    job = Job(name, more.pop("model", "gpt2-medium"), more.pop("accumulate", 8), blocks, repeat)
    loss = 0.0 if name == "legs" else 2.5
    told = {"accumulator": "fp32, I", "launches": 7, "state_bytes": 2 * GIB}
    return Record(job, more.pop("status", "ok"), (seconds,) * 3, int(peak * GIB), loss=loss, more=told, **more)


def race(records: list[Record], **setup: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(json.dumps(make_report([(SETUP | setup, records)])))
    return report


def uneven() -> list[Record]:
    return [record(name, *time) for name, time in TIMES.items()]


def part(name: str, report: dict[str, Any] | None) -> str:
    """The rendering of one part, whatever stood there before."""
    page = f"before\n<!-- generated: {name} -->\nstale\n<!-- end -->\nafter\n"
    made = render(page, {} if report is None else {name: report})
    assert "stale" not in made
    assert made.startswith("before\n<!-- generated")
    assert made.endswith("<!-- end -->\nafter\n")
    assert render(made, {} if report is None else {name: report}) == made
    return made


def test_what_has_no_file_was_not_measured_yet() -> None:
    assert "\nNot measured yet: there is no `benchmarks/results/even.json`.\n" in part("even", None)


def test_a_race_is_told_with_its_setup_rows_and_picture() -> None:
    text = part("uneven", race([*uneven(), record("paro_iig", 0.9, 6.0, repeat=2)]))
    assert "### Run 1: 2 hosts × 2 ranks, 2 GPUs\n\nMade Up 1; between hosts: a string; torch 9.8; one run.\n" in text
    row = "| **paro_iig** | 4 | 0.850 | 0.800 … 0.900 | 5.18 | 1.41 | 6144 | fp32, I | 2.5000 |"
    assert row in text
    assert "| fully_shard_2d | 4 | 1.200 | one repeat | 3.67 | 1.00 | 6656 | fp32, I | 2.5000 |" in text
    assert "| legs | 4 | 0.200 | one repeat |  |  | 1024 | fp32, I |  |" in text, "it trains nothing"
    assert "](pictures/uneven-1.png)" in text


def test_bars_say_by_how_much() -> None:
    text = part("uneven", race(uneven()))
    assert "| best PaRO, times as fast as FSDP FULL_SHARD | ≥ 5.5 | 5.867 | reached by 6.7 % |" in text
    assert "| best PaRO, times as fast as the best HSDP | ≥ 2.0 | 1.600 | **missed** by 20 % |" in text
    assert "| paro_iig, memory of fully_shard 2-D | ≤ 0.93 | 0.923 | reached by 0.7 % |" in text
    assert "| paro_ggg, memory of" not in text
    assert "* gpt2-medium, s = 8, 2 hosts on 2 GPUs, bar: paro_ggg, memory of FSDP FULL_SHARD.\n" in text


def test_a_bar_beyond_floor_and_legs_is_named_and_one_before_them_is_not() -> None:
    text = part("uneven", race([*uneven(), record("fully_shard_2d", 1.5, repeat=0, blocks=1)]))
    assert "* Floor 0.500 s + legs 0.200 s = 0.700 s; paro_nig takes 0.750 s, 1.07 of it, paro_iig takes" in text
    peer = "the best HSDP, fully_shard_2d at 1.200 s (1.500 s with one block a unit)"
    assert f"* 2 times as fast as {peer}, would be 0.600 s: less than floor + legs.\n" in text
    slower = [r for r in uneven() if r.job.contestant != "fully_shard_2d"] + [record("fully_shard_2d", 1.5)]
    assert "less than floor" not in part("uneven", race(slower))
    assert "Floor" not in part("uneven", race(uneven()[1:]))
    assert "Floor" not in part("cpu_hosts", race(uneven(), gpus=0))


def test_how_much_of_the_peak_is_model_state() -> None:
    text = part("uneven", race(uneven()))
    assert "* paro_iig's peak: 2048 MiB of model state, 4096 MiB of activations and what is in motion.\n" in text
    assert "* Collectives a step: paro_nig 7, paro_iig 7.\n" in text


def test_a_time_that_varies_within_the_run_is_named() -> None:
    scouted = [record("fsdp_full", 3.0, repeat=0), record("paro_iig", 0.81, repeat=0)]
    text = part("uneven", race(uneven() + scouted))
    assert "* More than 10 % apart: fsdp_full 3.000 s in the scouting, 4.400 s in the repeats.\n" in text


def not_run(text: str, setting: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"* {setting}, not run: "))
    return line.split("not run: ")[1].rstrip(".").split(", ")


def test_what_was_not_measured_is_named() -> None:
    failed = record("ddp", 0.0, status="out of memory")
    text = part("uneven", race([*uneven(), failed]))
    assert "* gpt2-medium s=8 ddp (repeat 1): out of memory.\n" in text
    absent = not_run(text, "gpt2-medium, s = 8, 2 hosts on 2 GPUs")
    assert sorted([*absent, *TIMES, "ddp"]) == sorted(CONTESTANTS)
    assert "* gpt2-medium, s = 8, 4 hosts on 2 GPUs, which has bars.\n" in text
    assert "2 hosts on 2 GPUs, which" not in text


def test_what_one_run_left_out_and_another_has_is_not_missing() -> None:
    first = race([*uneven(), record("ddp", 0.0, status="left out: late")])
    second = race([record("ddp", 2.0), record("paro_iig", 0.9, accumulate=1), record("paro_ggg", 0.0, status="broken")])
    text = part("uneven", {"setups": [*first["setups"], *second["setups"]]})
    assert "late" not in text
    assert "* gpt2-medium s=8 paro_ggg (repeat 1): broken.\n" in text
    absent = not_run(text, "gpt2-medium, s = 8, 2 hosts on 2 GPUs")
    assert not {"ddp", "paro_iig", "paro_ggg"} & {*absent}
    assert "ddp" in not_run(text, "gpt2-medium, s = 1, 2 hosts on 2 GPUs")


def test_columns_that_nobody_fills_are_left_out() -> None:
    records = [record(name, 1.0, peak=0) for name in ("paro_ggg", "fully_shard_1d")]
    text = part("even", race(records, hosts=1, gpus=0))
    assert "### Run 1: 1 host × 2 ranks, no GPU\n\nMade Up 1; torch 9.8; one run.\n" in text
    assert "| contestant | blocks | s/step | range | accumulator | loss |" in text
    assert not_run(text, "gpt2-medium, s = 8, 1 host on a CPU") == ["floor", "paro_nng", "ddp_zero", "paro_nnn", "ddp"]


def collectives() -> dict[str, Any]:
    times = {"flat": {"median_s": 0.012}, "two-level": {"median_s": 0.008}}
    row = {"nbytes": 2**20, "speedup": 1.5, "equal": True} | times
    rows = [row | {"operation": name} for name in OPERATIONS]
    rows += [row | {"operation": "all_reduce", "nbytes": 2**21, "equal": False}]
    return {"setups": [{"setup": SETUP, "rows": rows}]}


def test_collectives_are_told_by_size() -> None:
    text = part("collectives", collectives())
    assert f"| MiB | {' | '.join(OPERATIONS)} |" in text
    assert "| 1 | 12.00 / 8.00 = 1.50 | 12.00 / 8.00 = 1.50 | " in text
    assert "| 2 | not measured | not measured | 12.00 / 8.00 = 1.50 | not measured |" in text
    assert "Results of both differ: all_reduce of 2 MiB.\n" in text


def scaling() -> dict[str, Any]:
    row = {"contestant": "paro_iig", "parameters": 10**8, "step_s": 1.0, "predicted_s": 0.9, "in_turn_s": 1.25}
    cases = [("small", 8), ("base", 8), ("base", 1), ("base", 16)]
    rows = [row | {"model": model, "accumulate": count, "error": -0.1} for model, count in cases]
    links = {"inter": 1.5e9, "intra": 2e11, "column": None}
    return {"setup": SETUP, "links_bytes_per_s": links, "micro_batch_s": {"base": 0.06}, "rows": rows}


def test_predictions_stand_beside_what_was_measured() -> None:
    text = part("scaling", scaling())
    assert "The planner was told: inter 1.5 GB/s, intra 200 GB/s; a micro-batch of base 60.0 ms.\n" in text
    assert "| paro_iig | base | 100 | 16 | 1.000 | 0.900 | -10% | 1.250 |" in text


def choices() -> dict[str, Any]:
    """paro_nig is predicted to be the fastest; paro_nnn is, with more memory; paro_iig and paro_gig take half of it."""
    times = {"paro_nnn": (0.70, 10.0), "paro_nig": (0.75, 6.0), "paro_iig": (0.9, 5.0), "paro_gig": (0.8, 5.0)}
    races = race([record(name, *time) for name, time in times.items()] + [record("paro_iig", 3.0, repeat=0)])
    links = {"inter": 1.7e9, "intra": 1.2e10, "column": 1.7e9, "ring": 1.9e9}
    return compare(races, scaling() | {"links_bytes_per_s": links, "micro_batch_s": {"gpt2-medium": 0.065}})


def test_the_guideline_is_held_against_the_fastest_within_every_limit() -> None:
    (setting,) = choices()["settings"]
    assert [row["partition"] for row in setting["rows"]] == ["nnn", "nig", "gig", "iig"]
    assert [row["error"] for row in setting["rows"]] == [
        row["predicted_s"] / row["measured_s"] - 1 for row in setting["rows"]
    ]
    assert [(c["chosen"], c["fastest"], c["from_bytes"] / GIB) for c in setting["choices"]] == [
        ("nig", "nnn", 10), ("nig", "nig", 6), ("iig", "gig", 5),
    ]  # fmt: skip
    assert [c["costs"] for c in setting["choices"]] == pytest.approx([0.75 / 0.7 - 1, 0, 0.9 / 0.8 - 1])
    text = part("guideline", choices())
    assert "| 10240 | nig | nnn | 7% |\n| 6144 | nig | nig | 0% |\n| 5120 | iig | gig | 12% |\n" in text


def test_races_elsewhere_say_nothing_of_the_guideline() -> None:
    races = race([record(name, 1.0) for name in ("paro_nig", "paro_iig")], hosts=4)
    assert compare(races, scaling() | {"micro_batch_s": {"gpt2-medium": 0.065}})["settings"] == []


def one_sided() -> dict[str, Any]:
    times = {"alone_s": 0.001, "beside_s": 0.012}
    row = {"mebibytes": 24, "computation_s": 0.01, "collective": times, "copies": times | {"beside_s": 0.0111}}
    return {"setups": [{"setup": SETUP, "rows": [row | {"equal": True}, row | {"mebibytes": 96, "equal": False}]}]}


def test_copies_stand_beside_collectives() -> None:
    text = part("one_sided", one_sided())
    assert "| 24 | 1.00 | 1.00 | 10.00 | 12.00 | 11.10 |\n" in text
    assert "Results differ: 96 MiB.\n" in text


def test_pictures_stay_small_and_say_what_they_were_drawn_from(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    everybody = [record(name, 1.0 + number) for number, name in enumerate(CONTESTANTS)]
    everybody += [record(name, 2.0 + number, accumulate=1, repeat=2) for number, name in enumerate(CONTESTANTS)]
    reports = {"uneven": race(everybody), "collectives": collectives(), "scaling": scaling()}
    reports |= {"guideline": choices(), "one_sided": one_sided()}
    reports["cpu_hosts"] = race([record("paro_iig", 1.0, peak=0)], gpus=0)
    drawn = pictures(reports)
    races = {"uneven-1.png", "uneven-2.png", "cpu_hosts-1.png"}
    assert set(drawn) == races | {f"{name}.png" for name in ("collectives", "guideline", "one_sided", "scaling")}
    for name, (draw, data) in drawn.items():
        draw(data, tmp_path / name)
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 100_000, name
        assert digest(data).encode() in picture
