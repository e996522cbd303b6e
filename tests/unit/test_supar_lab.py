"""What is measured of SμPar, and how it is told."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import supar
from benchmarks.lab import supar_runs
from benchmarks.lab.supar_gpt import GPT
from benchmarks.lab.supar_models import Writer, text_of
from benchmarks.lab.supar_page import draw_coords, ratios, tell_coords, tell_formats, tell_time
from benchmarks.lab.supar_protocol import STUDIES, SUBJECTS, Run, Study
from benchmarks.lab.supar_sweep_page import draw_iso, draw_sweep, report_of, tell_iso, tell_sweep
from lightning_paro.experiments import Setting


@pytest.mark.parametrize(("name", "sparse"), [("llama", 14), ("perceptron", 4), ("window", 4), ("gpt", 8)])
def test_models_follow_their_setting_and_touch_no_generator(name: str, sparse: int) -> None:
    before = torch.get_rng_state()
    module = Writer(name, Setting("supar", 128, 0.25, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    plan = module.supar_plan
    assert plan is not None
    assert plan.width == 128 / SUBJECTS[name].base
    assert {plan[key].rho for key in plan.sparse} == {0.25}
    assert len(plan.sparse) == sparse
    assert module.training_step(torch.randint(256, (2, 9)), 0).isfinite()
    other = Writer(name, Setting("sp", 128, 1.0, seed=3))
    assert not other.supar_plan.sparse  # type: ignore[union-attr]


SETUP = {"device": "Made Up 1", "versions": {"torch": "9.8"}, "hosts": 1, "ranks_per_host": 1, "gpus": 0}


def _part() -> dict[str, Any]:
    rows = [
        {"parameterization": kind, "width": 8, "density": density, "module": "a.down", "values": [2.0 * r, 4.0 * r]}
        for kind, sparse in (("sp", 0.5), ("mup", 0.5), ("supar", 1.1))
        for density, r in ((1.0, 1.0), (0.5, sparse))
    ]  # fmt: skip
    return {
        "setup": SETUP, "model": "perceptron", "base": 4, "lr": 0.1, "init_std": 0.5, "seeds": 2,
        "steps": 2, "rows": rows,
    }  # fmt: skip


def test_ratios_are_to_the_dense_model() -> None:
    rows = _part()["rows"]
    assert ratios(rows, "sp", 8, 0.5) == [0.5, 0.5]
    assert ratios(rows, "supar", 8, 0.5) == pytest.approx([1.1, 1.1])


def test_it_is_told_and_drawn(tmp_path: Path) -> None:
    report = {"parts": [_part()]}
    text = "\n".join(tell_coords(report, "supar_coords"))
    assert "| 0.5 | 0.5 … 0.5 | 0.5 … 0.5 | 1.1 … 1.1 | 10% |" in text
    assert "means over 2 seeds" in text
    draw_coords(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()


def test_gpt_looks_back_only_and_less_far_away() -> None:
    torch.manual_seed(0)
    model = GPT(64, layers=2, head_dim=32)
    one = torch.randint(256, (1, 12))
    other = one.clone()
    other[:, 6:] = 0
    assert torch.equal(model(one)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(one)[:, 6:], model(other)[:, 6:])
    bias = model._bias(4, torch.device("cpu"))
    assert bias[:, 3].tolist() == [[-3 * s, -2 * s, -s, 0] for s in (2**-4, 2**-8)]
    assert bias[:, 0, 1:].isinf().all()
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(("arm", "std", "lr"), [("init", "supar", "mup"), ("lr", "mup", "supar")])
def test_arms_that_mix_have_half_of_each(arm: str, std: str, lr: str) -> None:
    plans = {
        name: Writer("perceptron", Run(name, 128, 0.25, 3, 0.1).setting, name).supar_plan for name in ("mup", "supar")
    }
    mixed = Writer("perceptron", Run(arm, 128, 0.25, 3, 0.1).setting, arm).supar_plan
    for name, entry in mixed.items():  # type: ignore[union-attr]
        assert entry.init_std == plans[std][name].init_std  # type: ignore[index]
        assert entry.lr_factor == plans[lr][name].lr_factor  # type: ignore[index]
        assert entry.rho == plans["supar"][name].rho  # type: ignore[index]
    assert plans["mup"] != plans["supar"]


def test_standard_deviations_are_those_of_the_paper() -> None:
    assert SUBJECTS["gpt"].std("sp", 4096) == pytest.approx(2.166e-2, rel=1e-3)
    assert SUBJECTS["gpt"].std("mup", 4096) == 0.08665602
    assert SUBJECTS["gpt-iso"].std("sp", 768) == 0.02


def test_learning_rates_rise_and_fall() -> None:
    from benchmarks.lab.supar_models import _factor

    factors = [_factor(100, step) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1
    assert factors[55] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)


@pytest.mark.parametrize("name", STUDIES)
def test_every_run_of_a_study_is_one(name: str) -> None:
    study = STUDIES[name]
    runs = list(study.runs())
    assert len(set(runs)) == len(runs)
    per_seed = sum(
        len(rates) for arm, rates in study.rates.items() for _, density in study.shapes
        if density < 1 or arm in ("sp", "mup")
    )  # fmt: skip
    assert len(runs) == per_seed * len(study.seeds)


SMALL = Study(
    "window", "hidden", ((64, 1.0), (64, 0.25)), {"sp": (0.01, 0.1), "mup": (0.01, 0.1), "supar": (0.01, 0.1)},
    seeds=(5,), steps=2, batch=2, length=16, decays=True,
)  # fmt: skip


def test_no_piece_of_the_text_is_seen_twice() -> None:
    loader = text_of(SMALL)
    assert [tuple(batch.shape) for batch in loader] == [(2, 16)] * 2
    assert len(torch.cat(list(loader)).unique(dim=0)) == 4
    with pytest.raises(ValueError, match="20000000 pieces of 16 bytes are needed, and the text has"):
        text_of(Study(**{**vars(SMALL), "steps": 10_000_000}))


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STUDIES, "small", SMALL)
    out = tmp_path / "small.json"
    command = f"supar sweep --study small --out {out}"
    monkeypatch.setattr(sys, "argv", command.split())
    supar.main()
    whole = json.loads(out.read_text())
    assert len(whole["rows"]) == 4 + 4 + 2
    out.write_text(json.dumps({**whole, "rows": whole["rows"][:-3]}))
    supar.main()
    again = json.loads(out.read_text())
    key = lambda row: (row["arm"], row["density"], row["seed"], row["lr"], row["loss"])  # noqa: E731
    assert sorted(map(key, again["rows"])) == sorted(map(key, whole["rows"]))
    monkeypatch.setitem(STUDIES, "small", Study(**{**vars(SMALL), "steps": 3}))
    with pytest.raises(SystemExit, match="are of another study: study .*HINT: give another --out"):
        supar.main()


@pytest.mark.full  # it starts processes
def test_several_at_a_time_find_what_one_does() -> None:
    tasks = [Setting("supar", 64, density, 1) for density in (1.0, 0.5)]
    work = functools.partial(supar_runs.check, "perceptron", 2, "cpu")
    one, two = (dict(supar_runs.pool(work, tasks, workers)) for workers in (1, 2))
    assert one.keys() == two.keys() == set(tasks)
    for task in tasks:
        for ours, theirs in zip(one[task], two[task], strict=True):
            assert ours["value"] == pytest.approx(theirs["value"], rel=1e-4)


def _sweep() -> dict[str, Any]:
    """A dense optimum at 2^-4; SP's moves by two octaves at a density of 1/4, SμPar's does not."""
    rates = [2.0**power for power in range(-7, 0)]
    rows = [
        {"arm": arm, "width": 64, "density": density, "seed": seed, "lr": lr,
         "loss": 2 + 0.1 * (math.log2(lr) - at) ** 2}
        for arm, density, at in (("sp", 1.0, -4), ("sp", 0.25, -2), ("mup", 1.0, -4), ("mup", 0.25, -3),
                                 ("supar", 0.25, -4))
        for seed in (1, 2) for lr in rates
    ]  # fmt: skip
    study = {
        "shapes": [[64, 1.0], [64, 0.25]], "rates": dict.fromkeys(("sp", "mup", "supar"), rates), "seeds": [1, 2],
        "steps": 5, "batch": 2, "length": 8,
    }  # fmt: skip
    return {"setup": SETUP, "study": study, "subject": {"model": "gpt", "base": 32}, "rows": rows}


def test_a_sweep_is_told_and_drawn(tmp_path: Path) -> None:
    report = _sweep()
    text = "\n".join(tell_sweep(report, "supar_global"))
    assert "| SP | 0.25 | -2.00 | +2.00 ± 0.00 | 2.0000 | 0.4000 |" in text
    assert "| SμPar | 0.25 | -4.00 | +0.00 ± 0.00 | 2.0000 | 0.0000 |" in text
    assert "SP does not (at most 2.00); μP carries over (at most 1.00); SμPar carries over (at most 0.00)." in text
    draw_sweep(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()
    report["rows"].pop()  # the last seed of SμPar is no longer whole
    assert {row["seed"] for row in report_of(report).rows if row["parameterization"] == "supar"} == {1}


def test_times_are_told() -> None:
    row = {"subject": "gpt", "width": 1024, "batch": 2, "length": 8, "parameters": 3_400_000}
    rows = [
        row | {"arm": "dense", "step_s": 0.01, "peak_bytes": 2**30},
        row | {"arm": "masked", "step_s": 0.0102, "peak_bytes": 1.25 * 2**30},
    ]
    text = "\n".join(tell_time({"setup": SETUP, "rows": rows}, "supar_time"))
    assert "| 3 million, width 1024 | 2 × 8 | SparseMask | 10.20 | 1.020 | 1.250 | +25.0% |" in text


def test_formats_are_told() -> None:
    rows = [{"out": 64, "in": 32, "rows": 16, "us": {"dense": 3.4, "2:4": 2.6, "CSR": None}}]
    text = "\n".join(tell_formats({"setup": SETUP, "rows": rows}, "supar_formats"))
    assert "| 64 × 32 | 16 | 3 | **3** | none |" in text


def test_models_with_equally_many_weights_are_told_and_drawn(tmp_path: Path) -> None:
    report = _sweep()
    report["study"]["shapes"] = [[64, 1.0], [128, 0.25]]
    report["study"]["rates"] = {"mup": [0.5], "supar": [0.5]}
    report["rows"] = [
        {"arm": arm, "width": width, "density": density, "seed": seed, "lr": 0.5, "loss": loss + seed}
        for arm, width, density, loss in (("mup", 64, 1.0, 1.0), ("mup", 128, 0.25, 0.75), ("supar", 128, 0.25, 0.5))
        for seed in (1, 2)
    ]
    text = "\n".join(tell_iso(report, "supar_iso"))
    assert "| 64 | 1 | 2.5000 (2.0000 to 3.0000) | 2.5000 (2.0000 to 3.0000) |" in text
    assert "| 128 | 0.25 | 2.2500 (1.7500 to 2.7500) | 2.0000 (1.5000 to 2.5000) |" in text
    draw_iso(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").is_file()


def test_a_run_takes_the_place_of_its_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "coords.json"
    monkeypatch.setattr(supar, "DENSITIES", (1.0, 0.5))
    found = []
    for widths, seeds in (("64", "1"), ("128", "1"), ("64 128", "1"), ("64", "2")):
        command = f"supar coords --subject perceptron --widths {widths} --seeds {seeds} --steps 1 --out {out}"
        monkeypatch.setattr(sys, "argv", command.split())
        supar.main()
        (part,) = json.loads(out.read_text())["parts"]
        found.append(({row["width"] for row in part["rows"]}, part["seeds"], len(part["rows"])))
    count = found[0][2]
    assert found == [({64}, 1, count), ({64, 128}, 1, 2 * count), ({64, 128}, 1, 2 * count), ({64}, 2, count)]
    parts = json.loads(out.read_text())["parts"]
    modules = {row["module"] for row in parts[0]["rows"]}
    assert {"model.embedding", "model.blocks.1.down", "model.head"} <= modules
    assert all(len(row["values"]) == 1 for row in parts[0]["rows"])
