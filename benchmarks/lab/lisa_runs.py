"""Measurements in processes of their own, several at a time where there is room; what is measured already stays."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lightning_paro
from benchmarks.lab.cluster import ROOT
from benchmarks.lab.report import save_whole

__all__ = ["Job", "Results", "run", "setup_of"]

LIMIT_S = 480.0
"""What a process may take."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
        runs: By run, under ``measure`` the name of a measurement in :mod:`benchmarks.lab.lisa_process`, and its
            options. They tell rows apart.
        gib: Memory of the GPU that it may take.
    """

    runs: tuple[Row, ...]
    gib: float = 0.0


def setup_of(device: str) -> dict[str, Any]:
    """The device and the versions of everything that matters."""
    versions = {"torch": str(torch.__version__)}
    for name in ("lightning", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions |= {"lightning_paro": lightning_paro.__version__, "python": platform.python_version()}
    where: dict[str, Any] = {"device": f"CPU, {os.cpu_count()} cores", "gpus": 0}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        where = {"device": properties.name, "gpus": 1, "memory_bytes": properties.total_memory}
        versions["cuda"] = str(torch.version.cuda)
    return where | {"hosts": 1, "ranks_per_host": 1, "versions": versions}


class Results:
    """The rows of a report, written to a file whenever there is a new one.

    Args:
        path: Where; rows that are there already stay if they are of the same setup.
        setup: Device and versions.
        finish: What follows from all rows, as it is written beside them.

    Raises:
        SystemExit: If the file is of another setup.
    """

    def __init__(self, path: Path, setup: dict[str, Any], finish: Callable[[list[Row]], Row]) -> None:
        self.report: dict[str, Any] = {"setup": setup, "rows": []}
        self._path, self._finish, self._lock = path, finish, threading.Lock()
        if path.exists():
            self.report = json.loads(path.read_text())
            there = self.report["setup"]
            differing = [key for key in setup if there.get(key) != setup[key]]
            if differing:
                told = "; ".join(f"{key} {there.get(key)} there, {setup[key]} here" for key in differing)
                raise SystemExit(
                    f"the rows in {path} are of another setup: {told}. HINT: give another --out, or move it away."
                )

    def missing(self, runs: Iterable[Row]) -> list[Row]:
        """Those that have no row, or one that failed."""
        done = [row for row in self.report["rows"] if row["status"] == "ok"]
        return [run for run in runs if not any(run.items() <= row.items() for row in done)]

    def add(self, run: Row, row: Row) -> None:
        """Take a row in, in place of an earlier one of that run."""
        with self._lock:
            others = [other for other in self.report["rows"] if not run.items() <= other.items()]
            self.report["rows"] = [*others, row]
            self.report |= self._finish(self.report["rows"])
            save_whole(self.report, self._path)


class Room:
    """Memory that processes share: each waits until there is as much as it may take."""

    def __init__(self, gib: float) -> None:
        self._whole = self._free = gib
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, gib: float) -> Iterator[None]:
        """So much of it; of what is larger than the whole, the whole."""
        taken = min(gib, self._whole)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


def run(jobs: Iterable[Job], results: Results, device: str, parallel: int = 1) -> None:
    """Run what is missing, and print a line a row.

    Args:
        jobs: In the order in which they begin.
        results: Where rows go.
        device: ``"cuda"`` or ``"cpu"``.
        parallel: Processes at a time; only memory is measured alike beside others.
    """
    room = Room(0.95 * results.report["setup"].get("memory_bytes", 0) / 2**30)
    log = Path(tempfile.gettempdir()) / f"lisa-{os.getpid()}.log"

    def one(job: Job) -> None:
        runs = results.missing(job.runs)
        if runs:
            with room.of(job.gib):
                _process(runs, results, device, log)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, jobs))


def _process(runs: list[Row], results: Results, device: str, log: Path) -> None:
    """One process; runs whose results did not come are rows that say so."""
    task = json.dumps({"device": device, "runs": runs})
    left = list(runs)
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.lab.lisa_process", task], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=errors, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        clock = threading.Timer(LIMIT_S, process.kill)
        clock.start()
        try:
            for line in process.stdout or ():
                _tell(left.pop(0), json.loads(line), results)
            code = process.wait()
        finally:
            clock.cancel()
            process.kill()
    for missing in left:
        _tell(missing, missing | {"status": f"the process ended with {code}: see {log}"}, results)


def _tell(run: Row, row: Row, results: Results) -> None:
    results.add(run, row)
    print(f"{' '.join(str(value) for value in run.values())}: {row['status']}", flush=True)
