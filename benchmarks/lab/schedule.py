"""What is measured, in which order, and what is left out when time runs short."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.cluster import Cluster, RankFailed, described
from benchmarks.lab.contestants import CONTESTANTS, missing

__all__ = ["Job", "Race", "Record", "repeats", "scouting"]

WARMUP, MEASURED = 2, 5
SCOUT_WARMUP, SCOUT_MEASURED = 1, 2
START_S, JOB_S, STEP_S = 45.0, 8.0, 1.0
"""What starting the ranks, a job beside its steps, and a step are taken to cost before anything was measured."""

PATIENCE_S = 120.0
"""What a job may take beyond three times what was expected of it: then it hangs."""


@dataclass(frozen=True)
class Job:
    """One contestant with one number of blocks; ``repeat`` 0 only finds out whether that number is its best."""

    contestant: str
    model: str
    accumulate: int
    blocks: int
    repeat: int

    @property
    def steps(self) -> tuple[int, int]:
        """Steps to warm up and steps to measure."""
        return (WARMUP, MEASURED) if self.repeat else (SCOUT_WARMUP, SCOUT_MEASURED)


@dataclass(frozen=True)
class Record:
    """What came of a job.

    Attributes:
        status: ``"ok"``, ``"left out: ..."`` or what went wrong.
        seconds: Of each measured step, the slowest rank's.
        peak_bytes: The largest rank's.
        first_loss: Mean over ranks.
        loss: The same, of the last step.
        more: What the contestant said of itself, on rank 0.
    """

    job: Job
    status: str
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    first_loss: float = 0.0
    loss: float = 0.0
    more: dict[str, Any] | None = None

    @classmethod
    def of(cls, job: Job, ranks: list[dict[str, Any]]) -> Record:
        """Join what the ranks measured."""
        seconds = tuple(max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True))
        mean = {key: sum(rank[key] for rank in ranks) / len(ranks) for key in ("first_loss", "loss")}
        known = {"seconds", "peak_bytes", "first_loss", "loss"}
        more = {key: value for key, value in ranks[0].items() if key not in known}
        return cls(job, "ok", seconds, max(rank["peak_bytes"] for rank in ranks), **mean, more=more)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)


def scouting(names: Iterable[str], model: str, accumulate: int) -> list[Job]:
    """A short job for each number of blocks of each contestant; none where there is only one number to choose."""
    return [
        Job(name, model, accumulate, blocks, repeat=0)
        for name in names
        if not (accumulate == 1 and CONTESTANTS[name].differs) and len(CONTESTANTS[name].blocks) > 1
        for blocks in CONTESTANTS[name].blocks
    ]


def repeats(names: Iterable[str], model: str, accumulate: int, records: Iterable[Record], repeat: int) -> list[Job]:
    """A full job for each contestant with its best number of blocks; from the second repeat on in a fresh order."""
    jobs = []
    for name in names:
        entry = CONTESTANTS[name]
        if accumulate == 1 and entry.differs:
            continue
        tried = [r for r in records if (r.job.contestant, r.job.model, r.job.accumulate) == (name, model, accumulate)]
        scouted = [r for r in tried if r.status == "ok" and r.job.repeat == 0]
        if scouted:
            best = min(scouted, key=lambda record: record.median).job.blocks
        elif len(entry.blocks) == 1:
            best = entry.blocks[0]
        else:
            continue  # nothing worked
        failed = any(r.job.repeat and r.status != "ok" and not r.status.startswith("left out") for r in tried)
        if not failed:
            jobs.append(Job(name, model, accumulate, best, repeat))
    if repeat > 1:
        random.Random(repeat).shuffle(jobs)
    return jobs


class Race:
    """Runs jobs on a cluster until they are done or the time is over, and writes down each as soon as it ends.

    Args:
        cluster: The ranks.
        limit: Seconds for everything.
        path: A file of JSON lines, one a job, after one about the setup.
        say: Called with a line about each job.
    """

    def __init__(self, cluster: Cluster, limit: float, path: Path, say: Callable[[str], None] = print) -> None:
        self.cluster, self.path, self.say = cluster, path, say
        self.records: list[Record] = []
        self.setup: dict[str, Any] = {}
        self._deadline = time.monotonic() + limit
        self._beside: list[float] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Start the ranks, and write down what they run on."""
        self.setup = described(self.cluster)
        self.path.write_text(json.dumps({"setup": self.setup}) + "\n")

    def run(self, names: list[str], models: list[str], accumulates: list[int], repeat: int) -> list[Record]:
        """Find the best number of blocks of each contestant, then measure it ``repeat`` times."""
        self.begin()
        present = [name for name in names if missing(name) is None]
        for name in names:
            if name not in present:
                self._keep(Record(Job(name, models[0], accumulates[0], 0, 0), f"not run: no {missing(name)} here"))
        for model in models:
            for accumulate in accumulates:
                for name in present:  # one after the other, so that what time allows is complete
                    for job in scouting([name], model, accumulate):
                        self.do(job)
                    for job in repeats([name], model, accumulate, self.records, 1):
                        self.do(job)
                for turn in range(2, repeat + 1):
                    for job in repeats(present, model, accumulate, self.records, turn):
                        self.do(job)
        return self.records

    def do(self, job: Job) -> Record:
        """One job, if there is time for it."""
        broken = [r for r in self.records if r.status.startswith("failed") and r.job.contestant == job.contestant]
        if broken:  # it would again, and the ranks would be started anew again
            return self._keep(Record(job, f"left out: blocks={broken[0].job.blocks} {broken[0].status}"))
        left = self._deadline - time.monotonic()
        expected = self._expected(job)
        if expected > left:
            return self._keep(Record(job, f"left out: {expected:.0f} s expected, {max(left, 0):.0f} s left"))
        entry = CONTESTANTS[job.contestant]
        warmup, measured = job.steps
        options = {"contestant": job.contestant, "model": job.model, "accumulate": job.accumulate}
        options |= {"blocks": job.blocks, "warmup": warmup, "measured": measured}
        where = "benchmarks.lab.train:measure"
        if entry.has_own_loop:
            where = f"benchmarks.lab.{entry.where}"
            options |= entry.options
        started = time.monotonic()
        try:
            record = Record.of(job, self.cluster.call(where, timeout=min(left, PATIENCE_S + 3 * expected), **options))
        except RankFailed as failure:
            what = "out of memory" if "OutOfMemory" in failure.kind else f"failed: {failure}"
            if failure.kind == "Timeout" and time.monotonic() >= self._deadline:
                what = "left out: not done when the time was over"
            return self._keep(Record(job, what))
        self._beside.append(max(0.0, time.monotonic() - started - (warmup + measured) * record.median))
        return self._keep(record)

    def _expected(self, job: Job) -> float:
        """Seconds that a job will probably take, by what was measured of its like so far."""
        known = [
            record.median
            for record in self.records
            if record.status == "ok"
            and (record.job.contestant, record.job.model, record.job.accumulate)
            == (job.contestant, job.model, job.accumulate)
        ]
        step = min(known) if known else STEP_S
        beside = sorted(self._beside)[len(self._beside) // 2] if self._beside else JOB_S
        return sum(job.steps) * step + beside + (0.0 if self.cluster.is_running else START_S)

    def _keep(self, record: Record) -> Record:
        self.records.append(record)
        with self.path.open("a") as lines:
            lines.write(json.dumps(asdict(record)) + "\n")
        job = record.job
        told = record.status
        if record.seconds:
            told = f"{record.median:.3f} s, {record.peak_bytes / 2**20:.0f} MiB, loss {record.loss:.4f}"
        turn = f"repeat {job.repeat}" if job.repeat else "scouting"
        self.say(f"{job.model} s={job.accumulate} {job.contestant} blocks={job.blocks} {turn}: {told}")
        return record
