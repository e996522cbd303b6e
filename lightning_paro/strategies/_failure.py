"""No rank waits for one that died: the first error is published, and whoever hangs on it ends with that error shown."""

from __future__ import annotations

import os
import sys
import threading
import traceback

import torch.distributed as dist

__all__ = ["FailureWatch"]

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0


class FailureWatch:
    """Watches, beside a run, whether another rank failed.

    A rank that sees a failure has a few seconds to fail by itself (a broken connection usually does that). If it is
    still waiting in a collective after that, it prints the original error and ends its process.

    Args:
        rank: This rank.
        run: Number of the run, the same on all ranks; keeps the runs of one process apart.
    """

    def __init__(self, rank: int, run: int) -> None:
        self._rank = rank
        default = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"lightning_paro/run{run}", default.clone())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_paro failure watch", daemon=True)
        self._thread.start()

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks what was raised here, and stop watching."""
        self._ended.set()
        text = "".join(traceback.format_exception(error))
        try:
            if not self._store.check(["error"]):
                self._store.set("error", f"rank {self._rank} failed:\n{text}")
        except Exception:  # noqa: S110 - the store died with rank 0, whose error is the one that counts
            pass

    def stop(self) -> None:
        """The run ended on this rank."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            try:
                if not self._store.check(["error"]):
                    continue
                message = self._store.get("error").decode()
            except Exception:
                message = "rank 0, which hosts the store, has gone."
            if not self._ended.wait(_GRACE_SECONDS):
                print(
                    f"lightning_paro: rank {self._rank} stops, because another rank failed while it was waiting.\n{message}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            return
