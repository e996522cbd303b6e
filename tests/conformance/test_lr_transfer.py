"""A sweep finds the best learning rate, its shift and its interval; it goes on where it was cut off."""

from __future__ import annotations

import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_paro.experiments import Setting, TransferReport, lr_transfer_sweep
from lightning_paro.experiments._runs_file import add_run, earlier_runs, head_of
from lightning_paro.experiments.lr_transfer import best_log2, student_t
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


def text_of(report: TransferReport) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(report)
    return console.file.getvalue()  # type: ignore[no-any-return, attr-defined]


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
    assert "+1.00" in text_of(report)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    report = TransferReport(rows({1.0: [-6.0], 0.25: [-5.0]}))
    assert report.optima()["sp", 8, 0.25].half_width is None
    report.plot(tmp_path / "a.png")
    report.write_csv(tmp_path / "a.csv")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 1 + 2 * len(LRS)


def test_where_all_diverged_there_is_no_best(tmp_path: Path) -> None:
    some = rows({1.0: [-6.0, -5.0], 0.5: [-5.0, -5.0], 0.25: [-5.0, -4.0]})
    lost = [row | {"loss": math.inf} if row["density"] == 0.25 else row for row in some]
    lost = [row | {"loss": math.inf} if (row["density"], row["seed"]) == (0.5, 1) else row for row in lost]
    report = TransferReport(lost)
    for density in (0.5, 0.25):
        best = report.optima()["sp", 8, density]
        numbers = (best.log2_lr, best.shift, best.half_width, best.regret)
        assert all(number is not None and math.isnan(number) for number in numbers)
        assert best.loss == math.inf
        assert not best.is_at_end
    line = next(line for line in text_of(report).splitlines() if "0.25" in line)
    assert [cell.strip() for cell in line.split("│")[3:-1]] == ["0.25", "none", "-", "", "inf", "-"]
    report.plot(tmp_path / "a.png")

    dense_lost = [row | {"loss": math.inf} if row["density"] == 1 else row for row in some]
    best = TransferReport(dense_lost).optima()["sp", 8, 0.25]
    assert math.isnan(best.shift)
    assert math.isnan(best.regret)
    assert best.log2_lr == pytest.approx(-4.5)
    TransferReport([row | {"loss": math.inf} for row in some]).plot(tmp_path / "b.png")


@pytest.mark.parametrize("dense", [[-9.0, -9.0], [-6.0, -9.0]])
def test_a_shift_from_an_end_is_marked(dense: list[float]) -> None:
    report = TransferReport(rows({1.0: dense, 0.25: [-5.0, -5.0]}))
    best = report.optima()["sp", 8, 0.25]
    assert (best.is_at_end, best.is_shift_at_end) == (False, True)
    assert f"{best.shift:+.2f} (end)" in text_of(report)
    sure = TransferReport(rows({1.0: [-6.0, -6.0], 0.25: [-5.0, -5.0]}))
    assert not sure.optima()["sp", 8, 0.25].is_shift_at_end
    assert "(end)" not in text_of(sure).split("(end): ")[0]


def test_the_report_says_whose_shift_it_is() -> None:
    told = " ".join(text_of(TransferReport(rows({1.0: [-6.0]}))).split())
    assert "the mean over seeds of the shift of each seed's own optimum" in told


@pytest.mark.parametrize(
    ("count", "quantile"),
    [(2, 12.706), (10, 2.262), (11, 2.228), (12, 2.201), (20, 2.093), (31, 2.042), (121, 1.980), (10_001, 1.960)],
)
def test_quantiles_are_students(count: int, quantile: float) -> None:
    assert student_t(count) == pytest.approx(quantile, abs=6e-4)


def test_intervals_of_many_seeds_are_students() -> None:
    best = TransferReport(rows({1.0: [-6.0] * 11, 0.25: [-5.0] * 10 + [-4.0]})).optima()["sp", 8, 0.25]
    assert best.half_width == pytest.approx(2.228 / 11, rel=1e-3)  # a standard deviation of 1 / √11


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


class OneCycle(Swept):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.supar_param_groups(0.01 if self.setting.lr is None else self.setting.lr))
        rates = [group["lr"] for group in optimizer.param_groups]
        schedule = OneCycleLR(optimizer, rates, total_steps=5, pct_start=0.4)  # the largest is that of the second step
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def sweep(make: Any = Swept, **options: Any) -> TransferReport:
    settings = {
        "lrs": [1e-3, 1e-2], "widths": [10], "densities": [1.0, 0.25], "parameterizations": ["supar"], "seeds": [0],
        "steps": 4, "trainer": {"accelerator": "cpu"},
    }  # fmt: skip
    return lr_transfer_sweep(make, DataLoader(batches(4), batch_size=None), **{**settings, **options})  # type: ignore[arg-type]


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


def test_one_cycle_has_its_largest_rate_swept() -> None:
    for mode in ("global", "hidden"):
        Swept.made.clear()
        sweep(OneCycle, mode=mode, densities=[0.25])
        for (_, module), lr in zip(Swept.made, [1e-3, 1e-2], strict=True):
            groups = module.supar_param_groups(1.0)
            others = lr if mode == "global" else 0.01
            expected = [(lr if group["is_hidden"] else others) * group["lr_factor"] for group in groups]
            assert module.rates[1] == pytest.approx(expected)
            for rates in module.rates:
                shares = [rate / largest for rate, largest in zip(rates, expected, strict=True)]
                assert shares == pytest.approx([shares[0]] * len(shares))


def test_a_module_has_to_use_the_rate_it_is_given() -> None:
    class Ignores(Swept):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.supar_param_groups(4e-3))

    message = (
        r"mode='global', setting.lr=0.001: expected that base rate in a group of the optimizer of Ignores, found "
        r"0.004. HINT: the module has to take its learning rate from setting.lr"
    )
    with pytest.raises(ValueError, match=message):
        sweep(Ignores)
    assert [module.rates for _, module in Swept.made] == [[]]  # before the first step
    sweep(Ignores, mode="hidden", densities=[1.0])


def test_a_training_step_has_to_return_its_loss() -> None:
    class Manual(Swept):
        def __init__(self, setting: Setting) -> None:
            super().__init__(setting)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
            self.manual_backward(super().training_step(batch, index))
            self.optimizers().step()  # type: ignore[union-attr]

    with pytest.raises(ValueError, match="Manual.training_step: .* found none. HINT: return the loss from training_"):
        sweep(Manual)


def test_a_loss_is_the_mean_of_the_last_tenth() -> None:
    report = sweep(steps=30, lrs=[1e-3, 1e-2], densities=[1.0])
    assert len(report.rows) == 2
    again = sweep(steps=30, lrs=[1e-3, 1e-2], densities=[1.0])
    assert [row["loss"] for row in report.rows] == [row["loss"] for row in again.rows]


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "sweep.jsonl"
    whole = sweep(path=path)
    lines = path.read_text().splitlines()
    about = {"mode": "global", "steps": 4, "make": "Swept", "trainer": {"accelerator": "'cpu'"}}
    assert json.loads(lines[0]) == about
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
    with pytest.raises(ValueError, match="is of another sweep: .*'Swept'.* there, .*'OneCycle'.* here. HINT"):
        sweep(OneCycle, path=path)
    with pytest.raises(ValueError, match="is of another sweep: .* there, .*'bf16-mixed'.* here. HINT"):
        sweep(path=path, trainer={"accelerator": "cpu", "precision": "bf16-mixed"})


def test_modules_are_told_apart_by_names() -> None:
    class Called:
        def __call__(self, setting: Setting) -> Any: ...

    makes = {
        "Swept": Swept,
        "Swept('a', 2, depth=None, data=Tensor)": partial(Swept, "a", 2, depth=None, data=torch.zeros(2)),  # type: ignore[arg-type, call-arg]
        "test_modules_are_told_apart_by_names.<locals>.Called": Called(),
    }
    assert [head_of(make, {})["make"] for make in makes.values()] == list(makes)
    assert head_of(Swept, {"b": object(), "a": 1})["trainer"] == {"a": "1", "b": "<object object>"}


HEAD = {"steps": 4}
RUNS = {Setting("supar", 10, density, 0, 0.01): loss for density, loss in ((1.0, 3.5), (0.5, math.inf), (0.25, 3.0))}


def runs_file(folder: Path) -> Path:
    path = folder / "sweep.jsonl"
    assert earlier_runs(path, HEAD) == {}
    for setting, loss in RUNS.items():
        add_run(path, setting, loss)
    assert earlier_runs(path, HEAD) == RUNS
    return path


@pytest.mark.parametrize("left", range(4))
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, left: int) -> None:
    path = runs_file(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    for length in range(len(lines[left])):
        path.write_text("".join(lines[:left]) + lines[left][:length])
        runs = earlier_runs(path, HEAD)
        assert list(runs.items()) == list(RUNS.items())[: max(left - 1, 0)]
        assert path.read_text() == "".join(lines[: max(left, 1)])  # so that the next line stands by itself
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bad", ["", "nothing", "[1]", '{"loss": 1}', '{"lr": 1}'])
def test_other_lines_have_to_be_read(tmp_path: Path, bad: str) -> None:
    path = runs_file(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], bad, *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"sweep.jsonl, line 3: expected a run as JSON, found .*. HINT: "):
        earlier_runs(path, HEAD)
    path.write_text("no\n")
    with pytest.raises(ValueError, match=r"sweep.jsonl, line 1: expected what the sweep is of as JSON, found 'no'"):
        earlier_runs(path, HEAD)


def test_numbers_may_be_numpys(tmp_path: Path) -> None:
    options = {"path": tmp_path / "sweep.jsonl", "densities": numpy.array([0.25])}
    first = sweep(lrs=numpy.array([1e-3, 1e-2]), widths=numpy.array([10]), seeds=numpy.arange(1), **options)
    assert {type(value) for row in first.rows for value in row.values()} == {str, int, float}
    Swept.made.clear()
    assert sweep(**options).rows == first.rows
    assert not Swept.made


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
        ({"lrs": [1e-3, "1e-2"]}, "lrs: expected numbers, and '1e-2' is none"),
        ({"lrs": [1e-3, math.nan]}, "expected two or more different positive numbers"),
        ({"widths": [10.5]}, "widths: expected whole numbers, and 10.5 is none"),
        ({"widths": [True]}, "widths: expected whole numbers, and True is none"),
        ({"seeds": [math.inf]}, "seeds: expected whole numbers, and inf is none"),
        ({"densities": [None]}, "densities: expected numbers, and None is none"),
        ({"widths": 10}, "widths=10: expected one or more different values"),
        ({"mode": "local"}, "mode='local' is not understood: expected 'global' or 'hidden'"),
        ({"seeds": []}, "seeds=...: expected one or more"),
        ({"steps": -1}, "steps=-1 must be a whole number, 1 or more"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number, 1 or more"),
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
