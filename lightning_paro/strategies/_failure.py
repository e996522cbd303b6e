"""No rank waits for one that died, or that waits elsewhere: the error is published and ends every rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_paro.collectives import ProcessGroups

__all__ = ["FailureWatch"]

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_STALL_SECONDS = 60.0

_DISTRIBUTED = str(Path(str(dist.__file__)).parent)
_INSIDE = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[1]), str(contextlib.__file__))

_runs = itertools.count()  # the same on all ranks; keeps the runs of one process apart in the store


class FailureWatch:
    """A thread that watches, beside a run, whether the ranks can still finish what they wait for.

    * Another rank failed: this one has a few seconds to fail by itself, as a broken connection makes it. If it is still
      waiting in a collective after that, it prints the original error and ends its process.
    * Every rank has been waiting for a long time, in different collectives, of ours or of anybody's: that is a
      deadlock. All print who waits where and end. It sees where the host waits: always on gloo, on NCCL where the ranks
      agree on something over the host.

    Args:
        groups: The process groups, which know the rank and its progress.
        timeout: The timeout of the process groups; a deadlock is declared well before it.
    """

    def __init__(self, groups: ProcessGroups, timeout: timedelta | None) -> None:
        self._groups = groups
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore(f"lightning_paro/run{next(_runs)}", store.clone())
        self._stall = min(_STALL_SECONDS, timeout.total_seconds() / 3) if timeout else _STALL_SECONDS
        self._ended = threading.Event()
        self._failed = False
        self._trainer = threading.get_ident()
        self._call: tuple[object, float] = (None, 0.0)  # the latest of torch.distributed that was seen, and since when
        threading.Thread(target=self._watch, name="lightning_paro failure watch", daemon=True).start()

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks what was raised here; from now on only watch that they are still there."""
        self._failed = True
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(RuntimeError):  # the store died with rank 0, whose error is the one that counts
            self._tell(f"rank {self._groups.rank} failed at {self._groups.progress.place}:\n{text}")

    def stop(self) -> None:
        """The run ended on this rank."""
        self._ended.set()

    def _tell(self, message: str) -> None:
        if not self._store.check(["error"]):
            self._store.set("error", message)

    def _watch(self) -> None:
        published = _Wait("", "")
        while not self._ended.wait(_POLL_SECONDS):
            try:
                if self._failed:  # perhaps all ranks did, and save a checkpoint together
                    if self._store.check(["left"]):
                        message = "this rank failed, and the others have left."
                        break
                    continue
                if self._store.check(["error"]):
                    message = self._store.get("error").decode()
                    break
                wait = self._waits_in()
                if wait != published:
                    self._store.set(f"place/{self._groups.rank}", "\n".join(wait))
                    published = wait
                if wait.what:
                    self._look_for_deadlock()
            except RuntimeError:
                message = "rank 0, which hosts the store, has gone."
                break
        if not self._ended.wait(_GRACE_SECONDS):
            here = self._groups.progress.place
            print(
                f"lightning_paro: rank {self._groups.rank} stops at {here}: what it waits for will not come.\n"
                f"{message}",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(RuntimeError):
                self._store.set("left", "")
            os._exit(1)

    def _waits_in(self) -> _Wait:
        """The collective, of ours or of anybody's, in which this rank has been waiting for long; empty if in none."""
        frame = sys._current_frames().get(self._trainer)
        progress = self._groups.progress
        if progress.waiting() > self._stall:
            return _Wait(str(progress.place), f"{progress.place}, called at {_line(frame)}")
        name = _name_of_call(frame)
        call = (progress.place, id(frame), frame.f_lasti) if frame is not None and name else None
        now = time.monotonic()
        if call is None or call != self._call[0]:
            self._call = (call, now)
        if call is None or now - self._call[1] <= self._stall:
            return _Wait("", "")
        what = f"torch.distributed.{name}"
        return _Wait(what, f"{what}, called at {_line(frame)}; the latest of ours was {progress.place}")

    def _look_for_deadlock(self) -> None:
        keys = [f"place/{rank}" for rank in range(self._groups.topology.world_size)]
        if not self._store.check(keys):
            return
        waits = [_Wait(*self._store.get(key).decode().split("\n")) for key in keys]
        if all(wait.what for wait in waits) and len({wait.what for wait in waits}) > 1:
            lines = "\n".join(f"  rank {rank}: {wait.where}" for rank, wait in enumerate(waits))
            self._tell(
                f"all ranks have been waiting for more than {self._stall:.0f} s, in different collectives:\n{lines}\n"
                "HINT: every rank must make the same collective calls in the same order, so call full_parameters, "
                "grad_norm, save_checkpoint and log(sync_dist=True) on all ranks, not on rank 0 only. With partitioned "
                "parameters the units that run must be the same as well: make the choice of layers the same on all "
                "ranks, or use a strategy with p=N such as paro_nig."
            )


class _Wait(NamedTuple):
    what: str  # the same on ranks that wait for each other
    where: str  # for people


def _name_of_call(frame: FrameType | None) -> str:
    """The function of torch.distributed that a thread is in, the outermost; empty if it is in none."""
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED):
        if frame.f_code.co_name != "wrapper":  # a logging decorator's
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor ours: where whoever waits called what he waits in."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSIDE):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
