"""A pool of worker processes that are started once and then run one test function after another.

Imports cost seconds, so the workers are forks of one process that has done them; a collective costs a millisecond. A
test hands the pool a module-level function, which runs on every rank at once::

    results = pool.run(function, argument)   # one result per rank

An exception on a rank is reported with its traceback. Workers look to Lightning like ranks started by torchrun, so a
``Trainer(devices=4)`` inside the function trains in the pool.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.interpreter import FORKS

WORLD_SIZE = 4
START_TIMEOUT = 120  # on top of a test's own: on a busy machine the imports of the first start take long


class WorkerError(Exception):
    """A function failed on at least one rank; ``errors`` holds the exception of every rank, None where it passed."""

    def __init__(self, errors: list[tuple[str, str, str] | None]) -> None:
        self.errors = errors
        shown = [f"--- rank {rank} ---\n{error[2]}" for rank, error in enumerate(errors) if error]
        super().__init__("\n".join(shown))

    def messages(self) -> list[str | None]:
        """``"Type: message"`` of every rank."""
        return [f"{error[0]}: {error[1]}" if error else None for error in self.errors]


class Pool:
    """Ranks of a gloo process group on loopback."""

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        self._world_size = world_size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank and return the results by rank.

        Raises:
            WorkerError: If it raised anywhere.
            TimeoutError: If a rank did not answer in time; the pool starts anew at the next call.
        """
        deadline = time.monotonic() + timeout
        if not self._workers:
            self._start()
            deadline += START_TIMEOUT
        for _, connection in self._workers:
            connection.send((function, args, kwargs))
        answers: list[Any] = []
        for rank, (process, connection) in enumerate(self._workers):
            while not connection.poll(0.05):
                if not process.is_alive() or time.monotonic() > deadline:
                    state = "died" if not process.is_alive() else f"did not answer in {timeout} s"
                    self.close()
                    raise TimeoutError(f"rank {rank} {state} in {function.__module__}.{function.__qualname__}")
            try:
                answers.append(connection.recv())
            except (EOFError, ConnectionError):
                self.close()
                raise TimeoutError(f"rank {rank} died in {function.__module__}.{function.__qualname__}") from None
        errors = [answer if failed else None for failed, answer in answers]
        if any(errors):
            if not all(errors):  # some ranks are out of step with the others now
                self.close()
            raise WorkerError(errors)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End the workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        port = free_port()
        for rank in range(self._world_size):
            here, there = FORKS.Pipe()
            process = FORKS.Process(target=_work, args=(rank, self._world_size, port, there), daemon=True)
            process.start()
            self._workers.append((process, here))


def free_port() -> int:
    """A TCP port nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _work(rank: int, world_size: int, port: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="pool", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch

    faulthandler.enable()  # where a rank was that dies without an exception
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (False, function(*args, **kwargs))
        except BaseException as error:
            answer = (True, (type(error).__name__, str(error), traceback.format_exc()))
        try:
            connection.send(answer)
        except Exception:
            connection.send((True, ("PicklingError", "the result cannot be pickled", traceback.format_exc())))
