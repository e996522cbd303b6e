"""The forks that stand for commands: they must fail as commands do, or every test that starts one is worthless."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.interpreter import Python

FACTS = """
import json, os, sys
print(json.dumps([__name__, sys.argv[1:], os.environ.get("GIVEN"), os.environ.get("HOME"), os.getcwd(), sys.path[0],
                  os.getpgid(0) == os.getpid(), sorted({"torch", "lightning_paro"} & set(sys.modules))]))
"""


def _run(path: Path, code: str, *arguments: str, module: bool = False) -> tuple[int, str]:
    (path / "script.py").write_text(code)
    log = path / "log"
    target = ["-m", "script"] if module else [str(path / "script.py")]
    process = Python([*target, *arguments], log, cwd=path, environment={"GIVEN": "yes"})
    try:
        return process.wait(100), log.read_text()
    finally:
        process.kill()


@pytest.mark.parametrize("module", [False, True])
def test_a_fork_is_the_command_it_stands_for(tmp_path: Path, module: bool) -> None:
    code, output = _run(tmp_path, FACTS, "--one", "two", module=module)
    here = str(tmp_path)
    assert code == 0
    assert json.loads(output) == ["__main__", ["--one", "two"], "yes", None, here, here, True, ["torch"]]


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise ValueError('as told')", 1, "ValueError: as told"),
        ("import os; print('so far', flush=True); os.kill(os.getpid(), 9)", -9, "so far"),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
    ],
)
def test_it_ends_as_the_command_would(tmp_path: Path, code: str, expected: int, said: str) -> None:
    exit_code, output = _run(tmp_path, code)
    assert exit_code == expected
    assert said in output


def test_killing_it_ends_what_it_launched(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import subprocess; child = subprocess.Popen(['sleep', '900']); print(child.pid, flush=True); child.wait()"
    )
    process = Python([str(script)], log, environment={"PATH": os.environ["PATH"]})
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        deadline = time.monotonic() + 60
        while not log.exists() or not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
    assert process.poll() == process.returncode == -signal.SIGKILL
    command = Path(f"/proc/{int(log.read_text())}/cmdline")
    while command.exists() and command.read_bytes():  # a zombie has none
        assert time.monotonic() < deadline
        time.sleep(0.02)
