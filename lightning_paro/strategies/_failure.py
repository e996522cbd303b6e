"""No rank waits for one that died, or that waits elsewhere: the error is published and ends every rank."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paro.collectives import ProcessGroups

__all__ = ["FailureWatch"]

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_STALL_SECONDS = 60.0

_runs = itertools.count()  # the same on all ranks; keeps the runs of one process apart in the store


class FailureWatch:
    """A thread that watches, beside a run, whether the ranks can still finish what they wait for.

    * Another rank failed: this one has a few seconds to fail by itself, as a broken connection makes it. If it is still
      waiting in a collective after that, it prints the original error and ends its process.
    * Every rank has been waiting for a long time, in different collectives: that is a deadlock. All print who waits
      where and end.

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
        published = None
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
                place = str(self._groups.progress.place) if self._groups.progress.waiting() > self._stall else ""
                if place != published:
                    self._store.set(f"place/{self._groups.rank}", place)
                    published = place
                if place:
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

    def _look_for_deadlock(self) -> None:
        keys = [f"place/{rank}" for rank in range(self._groups.topology.world_size)]
        if not self._store.check(keys):
            return
        places = [self._store.get(key).decode() for key in keys]
        if all(places) and len(set(places)) > 1:
            lines = "\n".join(f"  rank {rank}: {place}" for rank, place in enumerate(places))
            self._tell(
                f"all ranks have been waiting for more than {self._stall:.0f} s, in different collectives:\n{lines}\n"
                "HINT: with partitioned parameters every rank must run the same units in the same order; make the "
                "choice of layers the same on all ranks, or use a strategy with p=N such as paro_nig."
            )
