"""A posed cluster: one set of processes that runs many jobs one after another.

NCCL decides by NCCL_HOSTID who shares a host. Ranks of one posed host talk over NVLink, posed hosts talk over TCP, and
two ranks of different hosts may share a GPU. Starting processes, importing and connecting cost tens of seconds, so the
processes stay and take jobs from a pipe; after a failure they are ended and started anew for the next job.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["ROOT", "Cluster", "RankFailed", "described", "gpus_of_host"]

ROOT = Path(__file__).parents[2]
START_S = 240.0
"""What starting the processes may take."""


class RankFailed(RuntimeError):
    """A job ended with an exception on some rank, or did not end in time.

    Attributes:
        kind: Name of the exception's class; ``"Timeout"`` if there was none.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def gpus_of_host(host: int, per_host: int, gpus: int) -> list[int]:
    """The GPUs of the ranks of a host: rank r is on GPU ``r % gpus``.

    Raises:
        ValueError: If ranks of one host would share a GPU, or hosts would overlap in part.
    """
    if gpus < per_host or gpus % per_host:
        raise ValueError(f"{gpus} GPUs do not divide into hosts of {per_host}. HINT: use a multiple of {per_host}.")
    return [(host * per_host + local) % gpus for local in range(per_host)]


@dataclass
class Cluster:
    """Ranks as processes, started by the first job.

    Args:
        hosts: Number of posed hosts.
        per_host: Ranks of each.
        gpus: Number of GPUs that they share; 0 is the CPU, with gloo.
        prefixes: What a host's processes are started with, such as ``ip netns exec NAME``; one for each host.
        interface: The network interface of all hosts.
        address: Address of the first host on it.
        network: What lies between hosts, in words.
        log: Where everything that ranks print goes.
    """

    hosts: int
    per_host: int
    gpus: int
    prefixes: list[list[str]] | None = None
    interface: str = "lo"
    address: str = "127.0.0.1"
    network: str = "TCP over loopback"
    log: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / f"lab-{os.getpid()}.log")
    starts: int = 0
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _replies: queue.Queue[tuple[int, str]] = field(default_factory=queue.Queue)

    @property
    def world_size(self) -> int:
        return self.hosts * self.per_host

    @property
    def is_running(self) -> bool:
        return bool(self._processes)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, timeout: float = 600.0, **options: Any) -> list[Any]:
        """Run ``function`` on every rank, and return what they return, by rank.

        Args:
            function: ``"package.module:name"``; called with the :class:`~benchmarks.lab.rank.Rank` and ``options``.
            timeout: Seconds after which the ranks are ended.
            options: What JSON can carry.

        Raises:
            RankFailed: If it raised on some rank or ran out of time. The next call starts new processes.
        """
        if not self._processes:
            self._start()
            self._exchange("benchmarks.lab.rank:ready", START_S, {})
        return self._exchange(function, timeout, options)

    def close(self) -> None:
        """End the processes, kindly at first."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + 15
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _exchange(self, function: str, timeout: float, options: dict[str, Any]) -> list[Any]:
        job = json.dumps({"call": function, "options": options}) + "\n"
        for process in self._processes:
            with contextlib.suppress(OSError):  # it is dead, and the end of its replies says so
                process.stdin.write(job)
                process.stdin.flush()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            try:
                rank, line = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._fail("Timeout", f"{timeout:.0f} s were not enough; {len(results)} ranks were done")
            reply = json.loads(line) if line else {"error": "Ended", "message": f"see {self.log}"}
            if "error" in reply:
                self._fail(reply["error"], f"rank {rank}: {reply['message']}")
            results[rank] = reply["result"]
        return [results[rank] for rank in range(self.world_size)]

    def _fail(self, kind: str, message: str) -> None:
        self._kill()
        raise RankFailed(kind, message)

    def _start(self) -> None:
        if self.gpus > torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise SystemExit(
                f"{self.gpus} GPUs are needed, found {found}. HINT: run it where there are as many, or on the CPU, "
                "--gpus 0, if it can."
            )
        self.starts += 1
        self._replies = queue.Queue()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        for rank in range(self.world_size):
            host, local = divmod(rank, self.per_host)
            prefix = self.prefixes[host] if self.prefixes else []
            with self.log.open("a") as log:
                process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", "benchmarks.lab.rank"],
                    env={**os.environ, **self._variables(rank, host, local, port)}, cwd=ROOT, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                )  # fmt: skip
            self._processes.append(process)
            threading.Thread(target=_listen, args=(rank, process, self._replies), daemon=True).start()

    def _variables(self, rank: int, host: int, local: int, port: int) -> dict[str, str]:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
        cards = shown.split(",")
        mine = [cards[gpu] for gpu in gpus_of_host(host, self.per_host, self.gpus)] if self.gpus else []
        return {
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host),
            "WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.per_host),
            "MASTER_ADDR": self.address, "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"host{host}", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface, "CUDA_VISIBLE_DEVICES": ",".join(mine), "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
        self._processes.clear()


def described(cluster: Cluster) -> dict[str, Any]:
    """What the ranks run on, and what lies between them, as it stands in every JSON."""
    settings = sorted(name for name in os.environ if name.startswith("NCCL_") and name != "NCCL_VERSION")
    tuned = [f"{name}={os.environ[name]}" for name in settings]
    return cluster.call("benchmarks.lab.rank:describe")[0] | {
        "hosts": cluster.hosts, "ranks_per_host": cluster.per_host, "gpus": cluster.gpus,
        "network": ", ".join([cluster.network, *tuned]),
    }  # fmt: skip


def _listen(rank: int, process: subprocess.Popen[str], replies: queue.Queue[tuple[int, str]]) -> None:
    """Pass on what a rank says, and an empty line at its end."""
    for line in process.stdout:
        replies.put((rank, line))
    replies.put((rank, ""))
