"""What LISA shows while it trains and afterwards, and that it counts right."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_paro.callbacks import LISA
from lightning_paro.callbacks._progress_text import short
from tests.conformance.lisa_models import Text, gpt2, llama
from tests.conformance.lisa_runs import fit, loader, quiet
from tests.distributed.lisa import TABLE, Net, table

LAYER = 6 * 7 + 7 + 7 * 6
OUTSIDE = 11 * 6 + 2 * 6 + 6 * 11 + 11
TRAINED = OUTSIDE + 2 * LAYER
STATE = 2 * 8 * TRAINED + 4 * (5 + 2 * 3)  # two moments in float64, and a step for each parameter


# ---- the progress bar -----------------------------------------------------------------------------------------------


class Reads(Callback):
    """What the bar's metrics say after each batch."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        bar = trainer.progress_bar_callback
        assert bar is not None
        self.texts.append(bar.get_metrics(trainer, module)["lisa"])


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("copied", [False, True])
def test_the_progress_bar_says_what_is_trained(kind: Any, copied: bool, capsys: Any) -> None:
    lisa, bar, reads = LISA(interval=2, sampler=table), kind(), Reads()
    if copied:
        lisa = copy.deepcopy(lisa)
    settings: dict[str, Any] = {"enable_progress_bar": True, "callbacks": [bar, reads]}
    trainer, module = fit(lisa, count=4, **settings)
    assert reads.texts == [
        f"{first},{second} ({TRAINED}, {STATE / 1000:.3g} kB)"
        for first, second in (TABLE[0], TABLE[0], TABLE[1], TABLE[1])
    ]
    assert "get_metrics" not in vars(bar)
    assert "lisa" not in bar.get_metrics(trainer, module)
    if kind is TQDMProgressBar:
        assert "lisa=3,4 (337, " in capsys.readouterr().out.replace("\r", "\n")


def test_a_bar_of_ones_own_keeps_its_metrics() -> None:
    class Mine(TQDMProgressBar):
        def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            return {"mine": 1}

    class Both(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            assert trainer.progress_bar_callback is not None
            assert trainer.progress_bar_callback.get_metrics(trainer, module).keys() == {"mine", "lisa"}

    trainer, _ = fit(LISA(), enable_progress_bar=True, callbacks=[Mine(), Both()])
    assert trainer.global_step == 8


def test_numbers_in_three_digits() -> None:
    numbers = (0, 7, 999, 1000, 12_345, 999_499, 999_999, 6_738_415_616, 10**13, 10**15)
    shown = ["0", "7", "999", "1 k", "12.3 k", "999 k", "1 M", "6.74 G", "10 T", "1000 T"]
    assert [short(number) for number in numbers] == shown
    assert [short(number, "B") for number in (7, 1000)] == ["7 B", "1 kB"]


# ---- loggers --------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_loggers_have_columns(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer, _ = fit(LISA(interval=2, sampler=table), logger=logger, log_every_n_steps=1)
    rows = _rows(Path(trainer.log_dir or "") / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(8))
    for step, row in enumerate(rows):
        assert [float(row["lisa/active_0"]), float(row["lisa/active_1"])] == list(TABLE[step // 2])
        assert float(row["lisa/trainable"]) == TRAINED
    assert [float(row["lisa/state_bytes"]) for row in rows] == [STATE] * 8


def test_large_numbers_are_logged_exactly(tmp_path: Path) -> None:
    class Counts(LISA):
        trainable = property(lambda self: 2**40 + 1)  # type: ignore[assignment]

    trainer, _ = fit(Counts(), logger=CSVLogger(tmp_path), log_every_n_steps=1, count=1)
    (row,) = _rows(Path(trainer.log_dir or "") / "metrics.csv")
    assert float(row["lisa/trainable"]) == 2**40 + 1


def test_the_table_and_the_picture(tmp_path: Path) -> None:
    lisa = LISA(interval=3, sampler=table)
    trainer, _ = fit(lisa, logger=CSVLogger(tmp_path))
    folder = Path(trainer.log_dir or "")
    rows = _rows(folder / "lisa.csv")
    assert list(rows[0]) == ["period", "step", *(f"layers.{index}" for index in range(5))]
    assert [(int(row["period"]), int(row["step"])) for row in rows] == [(0, 0), (1, 3), (2, 6)]
    for number, row in enumerate(rows):
        assert tuple(index for index in range(5) if row[f"layers.{index}"] == "1") == TABLE[number]
    assert (folder / "lisa.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ends_early_leaves_the_table(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 5:
                raise RuntimeError("enough")
            return super().training_step(batch, index)

    logger = CSVLogger(tmp_path)
    with pytest.raises(RuntimeError, match="enough"):
        fit(LISA(interval=2, sampler=table), logger=logger, build=Fails)
    assert [int(row["step"]) for row in _rows(Path(logger.log_dir) / "lisa.csv")] == [0, 2, 4]


def test_tensorboard_has_the_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    trainer, _ = fit(LISA(interval=2, sampler=table), logger=[logger, CSVLogger(tmp_path)], log_every_n_steps=1)
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    (picture,) = events.Images("lisa")
    assert picture.step == 6  # where the last period began
    assert picture.width > picture.height > 100
    assert [event.value for event in events.Scalars("lisa/active_1")] == [TABLE[step // 2][1] for step in range(8)]
    assert (Path(trainer.log_dir or "") / "lisa.csv").is_file()


@pytest.mark.parametrize("settings", [{"logger": False}, {"logger": True, "fast_dev_run": 2}], ids=str)
def test_without_a_logger_nothing_is_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    lisa = LISA(interval=1)
    fit(lisa, default_root_dir=tmp_path, **settings)
    assert lisa.periods
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_writes_no_picture(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("no")

    trainer = quiet(callbacks=[LISA(interval=1), Fails()], logger=CSVLogger(tmp_path))
    with pytest.raises(ValueError, match="no"):
        trainer.fit(Net(), loader(2))
    assert not list(tmp_path.rglob("lisa.*"))


# ---- the report -----------------------------------------------------------------------------------------------------


class Reports(Callback):
    """The report's rows after every step, while the gradients are there."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.rows.append(_rows_of(module, trainer.optimizers[0]))


def _rows_of(module: LightningModule, optimizer: Any = None) -> dict[str, Any]:
    report = LISA.memory_report(module, 2, precision="32-true", rank=4, optimizer=optimizer)
    return {row.arm: row for row in report.rows}


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_what_is_measured_is_what_was_predicted(build: Any) -> None:
    module, reports = Text(build()), Reports()
    before = _rows_of(module)
    assert "measured" not in before
    fit(None, module, callbacks=[reports, LISA(num_layers=2, interval=1)], precision="32-true")
    predicted = before[next(arm for arm in before if arm.endswith("+2L"))]
    assert len(reports.rows) == 8
    for rows in reports.rows:
        measured = rows.pop("measured")
        assert rows == before
        assert (measured.weights, measured.gradients) == (predicted.weights, predicted.gradients)
        assert 0 < measured.state - predicted.state <= 4 * len(list(module.parameters()))  # Adam's counters of steps
    assert predicted.total < 0.75 * before["full"].total
    assert _rows_of(module) == before
