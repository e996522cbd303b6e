"""A sweep finds the best learning rate, its shift and its interval; it goes on where it was cut off."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from lightning_paro.experiments import Setting, TransferReport, lr_transfer_sweep
from lightning_paro.experiments.lr_transfer import best_log2
from tests.distributed.supar import Net, batches, loss_of

LRS = [2.0**power for power in range(-8, -1)]


def parabola(at: float, lrs: list[float] = LRS) -> dict[float, float]:
    return {lr: 3 + 0.7 * (math.log2(lr) - at) ** 2 for lr in lrs}


@pytest.mark.parametrize("at", [-6.4, -5.0, -4.31, -3.6])
def test_the_best_of_a_parabola_is_its_vertex(at: float) -> None:
    assert best_log2(parabola(at)) == (pytest.approx(at), False)
    uneven = [2**-8, 2**-6.5, 2**-4, 2**-3.7, 2**-2]
    assert best_log2(parabola(at, uneven))[0] == pytest.approx(at)


def test_shifts_are_against_the_narrowest_and_densest() -> None:
    wide = [row | {"width": 16} for row in rows({0.5: [-4.5], 0.25: [-4.0]})]
    best = TransferReport([*wide, *rows({1.0: [-6.0], 0.25: [-5.0]})]).optima()
    assert {key[1:]: best.shift for key, best in best.items()} == {
        (8, 1.0): 0, (8, 0.25): pytest.approx(1), (16, 0.5): pytest.approx(1.5), (16, 0.25): pytest.approx(2),
    }  # fmt: skip


def test_the_best_at_an_end_says_so() -> None:
    assert best_log2(parabola(-9)) == (-8, True)
    assert best_log2(parabola(0)) == (-2, True)
    assert best_log2(dict.fromkeys(LRS[:3], 1.0) | {LRS[1]: 0.5, LRS[2]: math.inf}) == (-7, False)


def rows(shifts: dict[float, list[float]]) -> list[dict[str, Any]]:
    """By density the best log2 of each seed."""
    return [
        {"parameterization": "sp", "width": 8, "density": density, "seed": seed, "lr": lr, "loss": loss}
        for density, by_seed in shifts.items()
        for seed, at in enumerate(by_seed)
        for lr, loss in parabola(at).items()
    ]


def test_shifts_are_paired_by_seed() -> None:
    report = TransferReport(rows({1.0: [-6.0, -5.4, -5.6], 0.25: [-5.1, -4.4, -4.5]}))
    best = report.optima()["sp", 8, 0.25]
    assert best.shift == pytest.approx(1.0)
    deviation = 0.1  # of 0.9, 1.0, 1.1
    assert best.half_width == pytest.approx(4.303 * deviation / math.sqrt(3))
    assert report.optima()["sp", 8, 1.0].shift == 0
    by_lr = {lr: sum(parabola(at)[lr] for at in (-5.1, -4.4, -4.5)) / 3 for lr in LRS}
    assert best.regret == pytest.approx(by_lr[2**-6] - by_lr[2**-5])  # the dense models' best of the sweep is 2^-6
    assert report.optima()["sp", 8, 1.0].regret == 0
    with Console(width=120, record=True) as console:
        console.print(report)
    assert "+1.00" in console.export_text()


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    report = TransferReport(rows({1.0: [-6.0], 0.25: [-5.0]}))
    assert report.optima()["sp", 8, 0.25].half_width is None
    report.plot(tmp_path / "a.png")
    report.write_csv(tmp_path / "a.csv")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 2 * len(LRS)


class Swept(Net):
    """Keeps the rates that it was trained with."""

    made: list[tuple[Setting, Any]] = []  # noqa: RUF012

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting.density, setting.seed, parameterization=setting.parameterization)
        self.setting = setting
        self.rates: list[list[float]] = []
        Swept.made.append((setting, self))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        return loss_of(self, batch)

    def configure_optimizers(self) -> Any:
        groups = self.supar_param_groups(0.01 if self.setting.lr is None else self.setting.lr)
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [{"scheduler": LinearLR(optimizer, 1.0, 0.5, total_iters=4), "interval": "step"}]


@pytest.fixture(autouse=True)
def fresh() -> None:
    Swept.made.clear()


def sweep(**options: Any) -> TransferReport:
    settings = {
        "lrs": [1e-3, 1e-2], "widths": [10], "densities": [1.0, 0.25], "parameterizations": ["supar"], "seeds": [0],
        "steps": 4, "trainer": {"accelerator": "cpu"},
    }  # fmt: skip
    return lr_transfer_sweep(Swept, DataLoader(batches(4), batch_size=None), **{**settings, **options})  # type: ignore[arg-type]


def test_all_rates_are_swept() -> None:
    report = sweep()
    assert [(row["density"], row["lr"]) for row in report.rows] == [
        (1.0, 1e-3),
        (1.0, 1e-2),
        (0.25, 1e-3),
        (0.25, 1e-2),
    ]
    for setting, module in Swept.made:
        factors = [group["lr_factor"] for group in module.supar_param_groups(1.0)]
        for step, rates in enumerate(module.rates):
            assert rates == pytest.approx([setting.lr * factor * (1 - 0.5 * step / 4) for factor in factors])
    assert all(math.isfinite(row["loss"]) for row in report.rows)


def test_those_of_hidden_weights_alone_are_swept() -> None:
    sweep(mode="hidden")
    for (setting, module), lr in zip(Swept.made, [1e-3, 1e-2] * 2, strict=True):
        assert setting.lr is None
        groups = module.supar_param_groups(1.0)
        assert [group["is_hidden"] for group in groups].count(True) == 1
        for step, rates in enumerate(module.rates):
            bases = [lr if group["is_hidden"] else 0.01 for group in groups]
            factors = [group["lr_factor"] for group in groups]
            expected = [b * factor * (1 - 0.5 * step / 4) for b, factor in zip(bases, factors, strict=True)]
            assert rates == pytest.approx(expected)


def test_a_loss_is_the_mean_of_the_last_tenth() -> None:
    report = sweep(steps=30, lrs=[1e-3, 1e-2], densities=[1.0])
    assert len(report.rows) == 2
    again = sweep(steps=30, lrs=[1e-3, 1e-2], densities=[1.0])
    assert [row["loss"] for row in report.rows] == [row["loss"] for row in again.rows]


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "sweep.jsonl"
    whole = sweep(path=path)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"mode": "global", "steps": 4}
    path.write_text("\n".join(lines[:3]) + "\n")
    Swept.made.clear()
    resumed = sweep(path=path)
    assert len(Swept.made) == 2
    assert resumed.rows == whole.rows
    Swept.made.clear()
    assert sweep(path=path, densities=[1.0]).rows == whole.rows[:2]
    assert not Swept.made
    with pytest.raises(ValueError, match="is of another sweep: .*'global'.* there, .*'hidden'.* here. HINT"):
        sweep(path=path, mode="hidden")


def test_what_diverges_counts_as_infinite() -> None:
    class Diverges(Swept):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return super().training_step(batch, index) * (math.nan if self.setting.lr == 1e-2 else 1)

    report = lr_transfer_sweep(
        Diverges, DataLoader(batches(2), batch_size=None), lrs=[1e-3, 1e-2], widths=[10], densities=[1.0],  # type: ignore[arg-type]
        parameterizations=["sp"], seeds=[0], steps=2, trainer={"accelerator": "cpu"},
    )  # fmt: skip
    assert [math.isinf(row["loss"]) for row in report.rows] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lrs": [1e-3]}, "expected two or more different positive numbers"),
        ({"lrs": [1e-3, -1]}, "expected two or more different positive numbers"),
        ({"mode": "local"}, "mode='local' is not understood: expected 'global' or 'hidden'"),
        ({"seeds": []}, "seeds=...: expected one or more"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("...", ".*")):
        sweep(**options)


class Ungrouped(LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.net = torch.nn.Embedding(11, 11)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_hidden_rates_need_groups() -> None:
    with pytest.raises(ValueError, match="the optimizer of Ungrouped has no group of hidden weights. HINT: "):
        lr_transfer_sweep(
            Ungrouped, DataLoader(batches(2), batch_size=None), lrs=[1e-3, 1e-2], widths=[10], mode="hidden",  # type: ignore[arg-type]
            steps=2, trainer={"accelerator": "cpu"},
        )  # fmt: skip
