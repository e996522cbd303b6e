"""The runs of a study, several at a time in processes of their own; each is written down as soon as it is done."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.lab.supar_models import Writer, text, text_of
from benchmarks.lab.supar_protocol import STUDIES, SUBJECTS, Run, Study
from lightning_paro.experiments import Setting, coord_check, final_loss

__all__ = ["about", "check", "losses", "missing", "pool", "rows_in", "trainer_of"]

Row = dict[str, Any]
Task = TypeVar("Task")
Found = TypeVar("Found")

OPTIONS: dict[str, Row] = {"cpu": {"accelerator": "cpu"}, "cuda": {"accelerator": "gpu", "precision": "bf16-mixed"}}


def trainer_of(device: str) -> Row:
    """Arguments of every run's Trainer, by ``"cpu"`` or ``"cuda"``."""
    return OPTIONS[device]


def losses(name: str, device: str, run: Run) -> Row:
    """Train once, and say what the loss came to."""
    study = STUDIES[name]
    make = partial(Writer, study.subject, arm=run.arm, steps=study.steps if study.decays else None)
    begun = time.perf_counter()
    loss = final_loss(make, _text(name), run.setting, steps=study.steps, mode=study.mode, trainer=OPTIONS[device])
    return asdict(run) | {"loss": loss, "seconds": round(time.perf_counter() - begun, 2)}


@cache
def _text(name: str) -> Any:
    return text_of(STUDIES[name])


def check(name: str, steps: int, device: str, setting: Setting) -> Sequence[Row]:
    """The activations of one setting, as rows of a :class:`~lightning_paro.experiments.CoordReport`."""
    report = coord_check(
        partial(Writer, name), text(name, steps), widths=[setting.width], densities=[setting.density],
        parameterizations=[setting.parameterization], seeds=[setting.seed], steps=steps, trainer=OPTIONS[device],
    )  # fmt: skip
    return [dict(row) for row in report.rows]


def pool(work: Callable[[Task], Found], tasks: Sequence[Task], workers: int) -> Iterator[tuple[Task, Found]]:
    """Do several at a time, and give each with its result when it is done; with one worker in this process."""
    if workers == 1:
        _begin(os.cpu_count() or 1)
        yield from ((task, work(task)) for task in tasks)
        return
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawned, initializer=_begin, initargs=(1,)) as executor:
        futures = {executor.submit(work, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _begin(threads: int) -> None:
    warnings.filterwarnings("ignore", message="an output of")  # sparser than the rules are known to hold for
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(threads)


def about(name: str, setup: Row) -> Row:
    """What stands at the head of a study's rows; those of another one are not mixed with them."""
    study = asdict(STUDIES[name])
    return json.loads(json.dumps({"setup": setup, "study": study, "subject": asdict(SUBJECTS[study["subject"]])}))  # type: ignore[no-any-return]


def rows_in(path: Path, head: Row) -> list[Row]:
    """The rows of an earlier go, if there was one.

    Raises:
        SystemExit: If they are of another study or setup.
    """
    if not path.exists():
        return []
    there = json.loads(path.read_text(encoding="utf-8"))
    differing = [key for key in head if there.get(key) != head[key]]
    if differing:
        told = "; ".join(f"{key} {there.get(key)} there, {head[key]} here" for key in differing)
        raise SystemExit(f"the rows in {path} are of another study: {told}. HINT: give another --out, or move it away.")
    return list(there["rows"])


def missing(study: Study, rows: Sequence[Row]) -> list[Run]:
    """The runs of a study that have no row yet."""
    done = {Run(**{key: row[key] for key in Run.__dataclass_fields__}) for row in rows}
    return [run for run in study.runs() if run not in done]
