"""One rank fails; no other is left waiting, although ``timeout`` is half an hour, and the original error is shown."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.interpreter import Python

ROOT = Path(__file__).parents[2]
SECONDS = 150  # for starts on a busy machine; a rank that hangs would take 1800
SCRIPT = ["-m", "tests.conformance.failing"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def _run(log: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command whose processes must all end."""
    ranks = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    process = Python(arguments, log, ROOT, environment)
    try:
        code = process.wait(SECONDS)
        for _ in range(100):  # the last of them may still be on its way out
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.2)
        else:
            pytest.fail(f"a rank was left behind:\n{log.read_text()}")
    except subprocess.TimeoutExpired:
        pytest.fail(f"did not end in {SECONDS} s:\n{log.read_text()}")
    finally:
        process.kill()
    return code, log.read_text()


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param([], "raise", marks=pytest.mark.full),
        pytest.param([], "setup", marks=pytest.mark.full),
        # as "raise", but the failed rank then waits for the others to save a checkpoint
        pytest.param([], "save", marks=pytest.mark.full),
        ([], "kill"),
        pytest.param(TORCHRUN, "raise", marks=pytest.mark.full),
    ],
    ids=["popen-raise", "popen-setup", "popen-save", "popen-kill", "torchrun-raise"],
)
def test_a_failure_of_one_rank_ends_all_ranks(tmp_path: Path, launcher: list[str], how: str) -> None:
    code, output = _run(tmp_path / "log", *launcher, *SCRIPT, how)
    assert code != 0
    assert "came through" not in output
    if how != "kill":
        assert "ValueError: the original error" in output


@pytest.mark.parametrize("launcher", [[], pytest.param(TORCHRUN, marks=pytest.mark.full)], ids=["popen", "torchrun"])
def test_sigterm_to_one_rank_stops_all_after_the_same_step_with_a_checkpoint(
    tmp_path: Path, launcher: list[str]
) -> None:
    _, output = _run(tmp_path / "log", *launcher, *SCRIPT, "sigterm")
    assert "rank 1 received signal 15: all ranks stop after this step." in output
    assert "rank 0 stopped after step 3, saved step 3" in output
    assert "rank 1 stopped after step 3" in output
    assert "came through" not in output
