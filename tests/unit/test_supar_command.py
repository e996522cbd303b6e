"""``lightning-paro supar`` runs a user's model and writes what it found."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_paro.cli.main import main
from lightning_paro.cli.supar import _rates

SCRIPT = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.mixins import SuParMixin


class Small(SuParMixin, LightningModule):
    def __init__(self, setting):
        super().__init__()
        width, self.lr = setting.width, setting.lr or 0.01
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(16, width), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 16)
        )
        plan = {"density": setting.density, "parameterization": setting.parameterization, "seed": setting.seed}
        self.supar_setup(SuParPlan.from_model(self, base_width=32, init_std=0.2, **plan))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.supar_param_groups(self.lr))


def data():
    return DataLoader(torch.arange(128).view(8, 16) % 16, batch_size=2)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(SCRIPT)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    common = ["--make", "small.py:Small", "--data", "small.py:data", "--accelerator", "cpu"]
    monkeypatch.setattr(sys, "argv", ["lightning-paro", "supar", arguments[0], *common, *arguments[1:]])
    main()


def test_coord_check(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run(
        monkeypatch, "coord-check", "--widths", "64", "--densities", "1,1/4", "--seeds", "1", "--steps", "2",
        "--json", "out/a.json", "--csv", "out/a.csv", "--plot", "out/a.png", "--modules", "model.1,model.3",
    )  # fmt: skip
    text = capsys.readouterr().out
    assert "ρ = 0.25" in text
    assert "from the dense model's." in text
    rows = json.loads(Path("out/a.json").read_text())["rows"]
    assert {row["module"] for row in rows} == {"model.1", "model.3"}
    assert {row["density"] for row in rows} == {1, 0.25}
    assert Path("out/a.png").is_file()
    assert len(Path("out/a.csv").read_text().splitlines()) == 1 + 3 * 2 * 2 * 2


def test_sweep(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    arguments = [
        "sweep", "--widths", "64", "--densities", "1,0.25", "--parameterizations", "supar", "--seeds", "2",
        "--steps", "2", "--lrs", "2^-8..2^-6", "--runs", "runs.jsonl", "--csv", "out/b.csv",
        "--plot", "out/b.png", "--mode", "hidden",
    ]  # fmt: skip
    run(monkeypatch, *arguments)
    assert "The best learning rate" in capsys.readouterr().out
    with Path("out/b.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 2 * 3
    before = Path("runs.jsonl").read_text()
    run(monkeypatch, *arguments)
    assert Path("runs.jsonl").read_text() == before
    assert Path("out/b.png").is_file()


def test_a_sweep_refuses_a_model_with_a_rate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.py").write_text(SCRIPT.replace("setting.lr or 0.01", "0.01"))
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "sweep", "--widths", "64", "--lrs", "2^-8..2^-6", "--steps", "1")
    assert "Small, found 0.01. HINT: the module has to take its learning rate from setting.lr" in str(caught.value)


def test_rates() -> None:
    assert _rates("2^-9..2^-7") == [2**-9, 2**-8, 2**-7]
    assert _rates("0.1,2^-3, 1e-3") == [0.1, 0.125, 0.001]


@pytest.mark.parametrize("text", ["1..3", "1e-4..1e-2", "2^-5..2^-9", "2^-5..2^-5", "2^1.5..2^3"])
def test_ranges_are_of_powers_of_two_and_rise(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not understood: expected powers of two from low to high, as 2\^-9"):
        _rates(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--make", "small.py:Nope"], "small.py has no function or class Nope. HINT"),
        (["--make", "small.py"], "make='small.py' is not understood. HINT: file.py:name"),
        (["--make", "none.py:Small"], "there is no file none.py"),
        (["--make", "no.such.module:Small"], "No module named 'no'"),
        (["--widths", "wide"], "widths='wide' is not understood: expected numbers with commas between"),
        (["--densities", "1/0"], "densities='1/0' is not understood"),
        (["--parameterizations", "ntk"], "'ntk' is not one of"),
    ],
)
def test_what_is_not_understood(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "coord-check", "--widths", "64", *arguments)
    assert message in str(caught.value)
