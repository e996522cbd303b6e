"""Real launches: two Lightning nodes, torchrun, SLURM's variables, and two hosts with a slow link between them.

However the ranks were started, what they trained must be what one process trains on the whole batch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.distributed import launched
from tests.distributed.pool import free_port
from tests.interpreter import Python

ROOT = Path(__file__).parents[2]
SECONDS = 200  # for one launch, which takes a tenth of it on an idle machine
LEFT_BY_A_TRAINER = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "PL_GLOBAL_SEED"}


class Command(NamedTuple):
    argv: list[str]
    variables: dict[str, str]


def script(*options: Any) -> list[str]:
    return [sys.executable, "-m", "tests.distributed.launched", *map(str, options)]


def launch(tmp_path: Path, *commands: Command) -> None:
    """Run the commands side by side, each in a process group of its own that ends with it."""
    inherited = {k: v for k, v in os.environ.items() if k not in LEFT_BY_A_TRAINER and not k.startswith("SLURM_")}
    inherited |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"command{number}.log" for number in range(len(commands))]
    processes: list[Python | subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            environment = inherited | command.variables
            if command.argv[0] == sys.executable:
                processes.append(Python(command.argv[1:], log, ROOT, environment))
                continue
            with log.open("wb") as output:
                streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "cwd": ROOT}
                processes.append(subprocess.Popen(command.argv, env=environment, start_new_session=True, **streams))
        deadline = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed or time.monotonic() > deadline:
                time.sleep(3 if failed else 0)  # let the others say what they think of it
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
    report = "\n".join(f"--- {c.argv}\n{log.read_text()}" for c, log in zip(commands, logs, strict=True))
    assert [process.returncode for process in processes] == [0] * len(processes), report


def assert_equals_one_process(out: Path, ranks: int, width: int = 32) -> dict[str, Any]:
    """Compare what rank 0 wrote with plain torch on the whole batch, and return it."""
    outcome: dict[str, Any] = torch.load(out, weights_only=True)
    model = launched.Net(width).double()
    optimizer = model.configure_optimizers()
    data = launched.samples(width, ranks)
    in_order = DistributedSampler(data, num_replicas=1, rank=0)  # of the one process: what Lightning gave all ranks
    batches = DataLoader(data, launched.BATCH * ranks, sampler=in_order)
    for number, (x, y) in enumerate(batches, start=1):
        (model.loss([x, y]) / launched.MICRO_BATCHES).backward()
        if number % launched.MICRO_BATCHES == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), launched.CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert outcome["steps"] == launched.STEPS
    assert outcome["weights"].keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        value = outcome["weights"][name]
        assert torch.isfinite(value).all(), name
        assert (value - expected).abs().max() <= 1e-10 * expected.abs().max(), name
    return outcome


def bytes_between_groups(width: int, ng: int, m: int) -> int:
    """What a rank sends to other groups under iig: gradients down and parameters up, once a step (PaRO, section 6)."""
    parameters = launched.BLOCKS * 4 * width**2 + width * launched.CLASSES * 8
    return launched.STEPS * 2 * (8 * parameters // m) * (ng - 1) // ng


def nodes(out: Path, address: str = "127.0.0.1", width: int = 32) -> list[Command]:
    """Two Lightning nodes of two ranks each; each node starts its second rank itself."""
    port = str(free_port())
    return [
        Command(
            script("--out", out, "--nodes", 2, "--devices", 2, "--width", width),
            {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@pytest.mark.full
def test_two_lightning_nodes_are_two_groups_and_equal_one_process(tmp_path: Path) -> None:
    out = tmp_path / "outcome.pt"
    launch(tmp_path, *nodes(out))
    outcome = assert_equals_one_process(out, ranks=4)
    assert outcome["topology"] == (2, 2)  # group_size is not given: the ranks of one host
    assert outcome["runs as"] == "iig"
    assert outcome["inter"] == bytes_between_groups(32, 2, 2)


def test_ranks_of_torchrun_equal_one_process(tmp_path: Path) -> None:
    out = tmp_path / "outcome.pt"
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # a port that nobody else can take in between
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous]
    argv = [sys.executable, *torchrun, *script("--out", out, "--devices", 2)[1:]]
    launch(tmp_path, Command(argv, {}))
    outcome = assert_equals_one_process(out, ranks=2)
    assert outcome["topology"] == (1, 2)
    assert outcome["runs as"] == "iii"
    assert outcome["inter"] == 0


def test_tasks_of_slurm_equal_one_process(tmp_path: Path) -> None:
    out = tmp_path / "outcome.pt"
    job = {"SLURM_JOB_ID": "271828", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    job |= {"SLURM_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands = [
        Command(
            script("--out", out, "--nodes", 2, "--devices", 1),
            job | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"},
        )
        for rank in range(2)
    ]
    launch(tmp_path, *commands)
    outcome = assert_equals_one_process(out, ranks=2)
    assert outcome["topology"] == (2, 1)
    assert outcome["runs as"] == "nng"
    assert outcome["inter"] == bytes_between_groups(32, 2, 1)


# ---- two hosts with a slow link ------------------------------------------------------------------------------


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces joined by a veth pair of 200 Mbit/s; skips where they cannot be made."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"paro{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ends = [["paro0", "netns", name] for name in names]
            ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "address", "add", f"192.168.231.{number}/24", "dev", "paro0")
                ip("-n", name, "link", "set", "paro0", "up")
                ip("-n", name, "link", "set", "lo", "up")
                shape = ["tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms"]
                ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "paro0", "root", *shape)
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"network namespaces with a shaped link cannot be made here: {getattr(error, 'stderr', error)}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


def bytes_sent(host: str) -> int:
    return int(ip("netns", "exec", host, "cat", "/sys/class/net/paro0/statistics/tx_bytes"))


@pytest.mark.network
def test_two_hosts_with_a_slow_link_equal_one_process_and_send_what_was_counted(tmp_path: Path) -> None:
    out, width = tmp_path / "outcome.pt", 128
    with two_hosts() as hosts:
        commands = [
            Command(["ip", "netns", "exec", host, *command.argv], command.variables | {"GLOO_SOCKET_IFNAME": "paro0"})
            for host, command in zip(hosts, nodes(out, "192.168.231.1", width), strict=True)
        ]
        before = [bytes_sent(host) for host in hosts]
        launch(tmp_path, *commands)
        sent = [bytes_sent(host) - earlier for host, earlier in zip(hosts, before, strict=True)]
    outcome = assert_equals_one_process(out, ranks=4, width=width)
    assert outcome["topology"] == (2, 2)
    counted = 2 * bytes_between_groups(width, 2, 2)  # by the two ranks of a host
    assert 2 * outcome["inter"] == counted
    # the model crosses once at the start and, in part, at the end
    model = 8 * sum(weight.numel() for weight in outcome["weights"].values())
    most = counted + 2 * model
    assert all(counted <= number <= 1.1 * most + 500_000 for number in sent), (sent, counted)


@pytest.mark.network
def test_the_hosts_are_gone_after_a_launch_that_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"\[3\]"), two_hosts() as hosts:
        launch(tmp_path, Command(["ip", "netns", "exec", hosts[0], sys.executable, "-c", "raise SystemExit(3)"], {}))
    assert not set(hosts) & set(ip("netns", "list").split())
