"""Commands of Python that start in milliseconds: forks of one process that has imported torch and lightning.

Those imports cost seconds in every process, and are never what is tested. A fork becomes what ``python script.py …`` or
``python -m module …`` would be, in a process group of its own; whatever it launches is launched for real. It has not
imported lightning_paro, so a script that forgets to still fails.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lightning.pytorch.cli"])


class Python:
    """As ``subprocess.Popen([sys.executable, *arguments], start_new_session=True)``, what it prints going to a file.

    Args:
        arguments: A path to a script, or ``-m`` and a module; then the arguments of either.
        log: The file that takes stdout and stderr.
        cwd: Where it runs; here by default.
        environment: All of its variables; those of this process by default.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.args = list(map(str, arguments))
        given = (self.args, log.absolute(), cwd or Path.cwd(), dict(os.environ if environment is None else environment))
        self._process = FORKS.Process(target=_become, args=given)
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: If it is still running after ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """End it and whatever it launched."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _become(arguments: list[str], log: Path, cwd: Path, environment: dict[str, str]) -> None:
    """In the fork: run a script or a module as the main one."""
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch was imported
        import torch

        torch.set_num_threads(int(threads))
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(cwd))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without
