"""SμPar's activations are those of the dense model at every density; those of SP and μP fall with it."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.lab.supar_models import Block
from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.callbacks import CoordCheck
from lightning_paro.experiments import CoordReport, Setting, coord_check
from lightning_paro.mixins import SuParMixin
from tests.distributed.supar import Net, batches, train

BASE, VOCABULARY = 64, 32
DENSITIES = (1.0, 1 / 8, 1 / 64)


class Residual(SuParMixin, LightningModule):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, setting.width)
        self.blocks = nn.ModuleList(Block(setting.width) for _ in range(2))
        self.norm = nn.LayerNorm(setting.width)
        self.head = nn.Linear(setting.width, VOCABULARY)
        plan = SuParPlan.from_model(
            self, base_width=BASE, density=setting.density, parameterization=setting.parameterization,
            init_std=BASE**-0.5, seed=setting.seed,
        )  # fmt: skip
        self.supar_setup(plan)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.roll(-1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(2**-8), betas=(0.9, 0.95))


def data() -> DataLoader:
    tokens = torch.randint(VOCABULARY, (10 * 16, 16), generator=torch.Generator().manual_seed(0))
    return DataLoader(tokens, batch_size=16)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_weights_on_purpose() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="an output of")
        yield


def test_supar_stays_where_sp_and_mup_fall() -> None:
    report = coord_check(
        Residual, data(), widths=[512], densities=DENSITIES, seeds=[0], steps=5, trainer={"accelerator": "cpu"}
    )
    assert len(report.rows) == 3 * 3 * 5 * (1 + 3 * 2 + 1)
    assert report.deviation("supar") < 0.25
    ratios = report.ratios()
    for name in ("sp", "mup"):
        for density in DENSITIES[1:]:
            inner = [r for key, r in ratios.items() if key[:3] == (name, 512, density) and key[3].endswith("down")]
            assert max(inner) < 1.5 * density**0.5  # two masked layers: in proportion to the density at first
        assert report.deviation(name) > 0.9


@pytest.mark.parametrize("kind", ["mup", "supar"])
def test_wider_is_as_large(kind: Any) -> None:
    report = coord_check(
        Residual, data(), widths=[64, 512], densities=[1.0], parameterizations=[kind], seeds=[0, 1], steps=5,
        trainer={"accelerator": "cpu"}, modules=["blocks.0", "blocks.1"],
    )  # fmt: skip
    means = report.means()
    for (_, width, density, module, step), value in means.items():
        assert value == pytest.approx(means[kind, 64, density, module, step], rel=0.25), (width, module, step)


def test_a_report_is_written(tmp_path: Path) -> None:
    report = coord_check(
        Residual,
        data(),
        widths=[64],
        densities=[1.0, 0.25],
        seeds=[0],
        steps=2,
        trainer={"accelerator": "cpu"},
        modules=["blocks.1"],
    )
    for name, write in (("a.csv", report.write_csv), ("a.json", report.write_json), ("a.png", report.plot)):
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 100
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2
    assert float(rows[-1]["value"]) == report.rows[-1]["value"]
    with Console(width=120, record=True) as console:
        console.print(report)
    assert "supar" in console.export_text()


def test_ratios_are_to_the_largest_density() -> None:
    common = {"parameterization": "sp", "width": 8, "module": "a", "step": 0}
    rows = [
        {**common, "density": density, "seed": seed, "value": value}
        for density, values in ((0.5, (2.0, 4.0)), (0.25, (1.0, 2.0))) for seed, value in enumerate(values)
    ]  # fmt: skip
    report = CoordReport(rows)
    assert report.ratios() == {("sp", 8, 0.5, "a", 0): 1.0, ("sp", 8, 0.25, "a", 0): 0.5}
    assert report.deviation("sp") == 0.5


@pytest.mark.parametrize(
    ("dense", "sparse", "deviation"),
    [
        (1.0, math.nan, math.inf), (math.nan, 1.0, math.inf), (1.0, math.inf, math.inf), (math.inf, math.inf, math.inf),
        (0.0, 0.0, 0.0), (0.0, 1.0, math.inf), (2.0, 1.0, 0.5),
    ],
)  # fmt: skip
def test_what_diverged_or_is_zero_deviates(dense: float, sparse: float, deviation: float) -> None:
    common = {"parameterization": "sp", "width": 8, "seed": 0, "step": 0}
    rows = [
        {**common, "module": module, "density": density, "value": value}
        for module, values in (("a", (1.0, 1.0)), ("b", (dense, sparse)), ("c", (1.0, 1.0)))
        for density, value in zip((1.0, 0.5), values, strict=True)
    ]
    assert CoordReport(rows).deviation("sp") == deviation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": []}, "widths=..: expected one or more different values"),
        ({"widths": [8, 8]}, "widths=.8, 8.: expected one or more different"),
        ({"widths": [8], "densities": [0.0]}, "densities=.0.0.: expected numbers above 0"),
        ({"widths": [8], "parameterizations": ["ntk"]}, "parameterizations: 'ntk' is not one of"),
        ({"widths": [8], "parameterizations": "sp"}, "parameterizations='sp': expected one or more"),
        ({"widths": [8], "steps": 0}, "steps=0 must be a whole number, 1 or more"),
        ({"widths": [8], "trainer": {"limit_train_batches": 0}}, "Residual made no step: there are no batches"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coord_check(Residual, data(), **arguments)


def test_what_was_not_run_has_no_deviation() -> None:
    common = {"width": 8, "seed": 0, "step": 0, "module": "a", "value": 1.0}
    report = CoordReport([{**common, "parameterization": "sp", "density": density} for density in (1.0, 0.5)])
    with pytest.raises(ValueError, match="no rows of 'mup'; expected one of sp"):
        report.deviation("mup")


# ---- the callback ---------------------------------------------------------------------------------------------------


class Waking(Net):
    """Counts what its first layer puts out by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                self.seen.append(x.abs().float().mean().item())
        return self.head(x)  # type: ignore[no-any-return]


def test_the_callback_records_means_over_a_steps_micro_batches(tmp_path: Path) -> None:
    check = CoordCheck(3)
    trainer, module = train(build=Waking, callbacks=[check], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert isinstance(module, Waking)
    mine = [row for row in check.rows if row["module"] == "layers.0"]
    assert [row["step"] for row in mine] == [0, 1, 2]
    for row in mine:
        both = module.seen[2 * row["step"] : 2 * row["step"] + 2]
        assert row["value"] == pytest.approx(sum(both) / 2)
        assert (row["m_d"], row["density"], row["parameterization"]) == (2, 0.5, "supar")
    names = {row["module"] for row in check.rows}
    assert names == {"embedding", "head", *(f"layers.{i}{part}" for i in range(3) for part in ("", ".up", ".down"))}
    folder = Path(trainer.log_dir or "")
    assert (folder / "coord_check.png").is_file()
    with (folder / "metrics.csv").open(newline="") as file:
        assert "coord/layers.0" in next(csv.reader(file))
    assert not any(part._forward_hooks for part in module.layers.modules())


def test_calls_of_validation_do_not_count() -> None:
    class Validated(Waking):
        def validation_step(self, batch: Tensor, index: int) -> None:
            self(batch * 0)
            self.seen.pop()

        def val_dataloader(self) -> Any:
            return DataLoader(batches(2), batch_size=None)  # type: ignore[arg-type]

        def on_train_batch_end(self, *_: Any) -> None:
            self.validation_step(torch.ones(1, 4, dtype=torch.long), 0)

    check = CoordCheck(3, ["layers.0"])
    _, module = train(build=Validated, callbacks=[check], accumulate=1, val_check_interval=1)
    assert isinstance(module, Validated)
    assert [row["value"] for row in check.rows] == pytest.approx(module.seen[:3])


def test_hooks_are_gone_after_an_error() -> None:
    class Fails(Net):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            raise KeyError("no")

    module = Fails()
    with pytest.raises(KeyError):
        train(build=lambda: module, callbacks=[CoordCheck()])
    assert not any(part._forward_hooks for part in module.layers.modules())


def test_arguments_of_the_callback() -> None:
    with pytest.raises(ValueError, match="steps=0 must be a whole number"):
        CoordCheck(0)
    with pytest.raises(ValueError, match=r"modules='head' must be several names. HINT: modules=\['head'\]"):
        CoordCheck(modules="head")
    with pytest.raises(ValueError, match="there is no module 'nothing' to watch"):
        train(callbacks=[CoordCheck(modules=["nothing"])])
