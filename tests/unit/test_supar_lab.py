"""What is measured of SμPar, and how it is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import supar
from benchmarks.lab.supar_models import MODELS, Writer
from benchmarks.lab.supar_page import draw_coords, ratios, tell_coords
from lightning_paro.experiments import Setting


@pytest.mark.parametrize("name", MODELS)
def test_models_follow_their_setting_and_touch_no_generator(name: str) -> None:
    before = torch.get_rng_state()
    module = Writer(name, Setting("supar", 128, 0.25, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    plan = module.supar_plan
    assert plan is not None
    assert plan.width == 2
    assert {plan[key].rho for key in plan.sparse} == {0.25}
    assert len(plan.sparse) == {"llama": 14, "perceptron": 4}[name]
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
        "setup": SETUP, "model": "perceptron", "widths": [8], "base": 4, "lr": 0.1, "init_std": 0.5, "seeds": 2,
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


def test_a_run_takes_the_place_of_its_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "coords.json"
    monkeypatch.setattr(supar, "DENSITIES", (1.0, 0.5))
    for widths, seeds in (("64", "1"), ("128", "1"), ("64", "2")):
        command = f"supar coords --model perceptron --widths {widths} --seeds {seeds} --steps 1 --out {out}"
        monkeypatch.setattr(sys, "argv", command.split())
        supar.main()
    parts = json.loads(out.read_text())["parts"]
    assert [(part["widths"], part["seeds"]) for part in parts] == [([128], 1), ([64], 2)]
    modules = {row["module"] for row in parts[0]["rows"]}
    assert {"model.embedding", "model.blocks.1.down", "model.head"} <= modules
    assert all(len(row["values"]) == 1 for row in parts[0]["rows"])
