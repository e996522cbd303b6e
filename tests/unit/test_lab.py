"""The lab of benchmarks/: where ranks are placed, what is run and what is left out, ratios and bars."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab import namespaces
from benchmarks.lab.bars import SETTINGS, even_bars, uneven_bars
from benchmarks.lab.cluster import Cluster, RankFailed, gpus_of_host
from benchmarks.lab.contestants import CONTESTANTS, partitions
from benchmarks.lab.guideline import workload
from benchmarks.lab.models import build
from benchmarks.lab.report import make_report, read
from benchmarks.lab.rows import rows_of
from benchmarks.lab.schedule import Job, Race, Record, repeats, scouting
from benchmarks.lab.tracing import by_phase
from benchmarks.scaling import compare
from lightning_paro.planner import Network, cost
from lightning_paro.topology import Partition, Topology

GIB = 2**30
CPU = torch.device("cpu")


def record(name: str, seconds: float, blocks: int = 1, repeat: int = 1, peak: float = 1.0, **more: Any) -> Record:
    job = Job(name, more.pop("model", "gpt2-medium"), more.pop("accumulate", 8), blocks, repeat)
    return Record(job, more.pop("status", "ok"), (seconds, seconds, seconds), int(peak * GIB), loss=2.0, **more)


# ---- where ranks are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "gpus", "expected"),
    [
        (2, 2, [[0, 1], [0, 1]]),
        (4, 2, [[0, 1]] * 4),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 4, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (1, 2, [[0, 1]]),
    ],
)
def test_ranks_of_a_host_have_a_gpu_each_and_hosts_share_them(hosts: int, gpus: int, expected: list[list[int]]) -> None:
    assert [gpus_of_host(host, 2, gpus) for host in range(hosts)] == expected


@pytest.mark.parametrize("gpus", [1, 3])
def test_gpus_that_do_not_divide_into_hosts_are_refused(gpus: int) -> None:
    with pytest.raises(ValueError, match=rf"{gpus} GPUs do not divide into hosts of 2. HINT: use a multiple of 2"):
        gpus_of_host(0, 2, gpus)


# ---- what is run ---------------------------------------------------------------------------------------------


def test_every_partition_competes() -> None:
    assert set(partitions()) <= set(CONTESTANTS)
    assert len(partitions()) == 14


def test_contestants_are_tried_with_1_2_and_4_blocks_and_those_without_a_choice_are_not() -> None:
    jobs = scouting(["floor", "fsdp_full", "fsdp_full_no_sync"], "gpt2-medium", 8)
    tried = [(job.contestant, job.blocks) for job in jobs]
    assert tried == [(name, blocks) for name in ("fsdp_full", "fsdp_full_no_sync") for blocks in (1, 2, 4)]
    assert all(job.repeat == 0 for job in jobs)


def test_what_differs_in_earlier_micro_batches_only_is_left_out_with_one() -> None:
    names = ["fsdp_full", "fsdp_full_no_sync"]
    assert {job.contestant for job in scouting(names, "gpt2-medium", 1)} == {"fsdp_full"}
    records = [record(name, 1.0, repeat=0, accumulate=1) for name in names]
    assert [job.contestant for job in repeats(names, "gpt2-medium", 1, records, 1)] == ["fsdp_full"]


def test_the_best_number_of_blocks_is_measured_and_what_failed_is_not_tried_again() -> None:
    records = [record("paro_iig", seconds, blocks, repeat=0) for blocks, seconds in ((1, 1.1), (2, 0.8), (4, 0.9))]
    records += [record("ddp", 0.1, 4, repeat=0, accumulate=1)]  # of another table
    records += [record("fsdp_full", 0.0, 1, repeat=0, status="out of memory")]
    records += [record("ddp_zero", 2.0, 1, repeat=0), record("ddp_zero", 0.0, 1, status="failed: KeyError: x")]
    names = ["floor", "paro_iig", "ddp", "fsdp_full", "ddp_zero"]
    jobs = repeats(names, "gpt2-medium", 8, records, 1)
    assert [(job.contestant, job.blocks, job.repeat) for job in jobs] == [("floor", 1, 1), ("paro_iig", 2, 1)]


def test_later_repeats_come_in_another_order_of_the_same_jobs() -> None:
    names = partitions()
    records = [record(name, 1.0, repeat=0) for name in names]
    orders = [[job.contestant for job in repeats(names, "gpt2-medium", 8, records, turn)] for turn in (1, 2, 3)]
    assert orders[0] == names
    assert sorted(orders[1]) == sorted(orders[2]) == sorted(names)
    assert orders[1] != orders[0] != orders[2] != orders[1]


class Ranks:
    """A cluster that answers by itself."""

    hosts, per_host, gpus, network, is_running = 2, 2, 2, "none", True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(self, function: str, **options: Any) -> list[dict[str, Any]]:
        if function.endswith(":describe"):
            return [{"device": "none"}]
        name, blocks = options["contestant"], options["blocks"]
        self.asked.append(f"{name}/{blocks}")
        if name == "ddp_zero":
            raise RankFailed("OutOfMemoryError", "rank 1: CUDA out of memory")
        if name == "fsdp_full":
            raise RankFailed("KeyError", "rank 0: 'x'")
        steps = [1.0 / blocks] * options["measured"]
        rank = {"seconds": steps, "peak_bytes": 5, "first_loss": 3.0, "loss": 2.0, "accumulator": "fp32, I"}
        return [rank, rank | {"seconds": [2 * second for second in steps], "peak_bytes": 7, "loss": 4.0}]


def test_a_race_goes_on_after_a_failure_and_writes_down_what_it_has(tmp_path: Path) -> None:
    ranks = Ranks()
    path = tmp_path / "race.jsonl"
    race = Race(ranks, 3600, path, say=lambda line: None)  # type: ignore[arg-type]
    race.run(["ddp_zero", "fsdp_full", "paro_iig", "deepspeed_zero1"], ["gpt2-medium"], [8], 1)
    assert ranks.asked == [
        "ddp_zero/1", "ddp_zero/2", "ddp_zero/4",  # more blocks may fit or not
        "fsdp_full/1",
        "paro_iig/1", "paro_iig/2", "paro_iig/4", "paro_iig/4",
    ]  # fmt: skip
    setup, records = read(path)
    assert setup == {"device": "none", "hosts": 2, "ranks_per_host": 2, "gpus": 2, "network": "none"}
    assert records == race.records
    statuses = {f"{r.job.contestant}/{r.job.blocks}": r.status for r in records}
    assert statuses["deepspeed_zero1/0"] == "not run: no deepspeed here"
    assert statuses["ddp_zero/2"] == "out of memory"
    assert statuses["fsdp_full/1"] == "failed: KeyError: rank 0: 'x'"
    assert statuses["fsdp_full/4"] == "left out: blocks=1 failed: KeyError: rank 0: 'x'"
    last = records[-1]
    assert (last.job.repeat, last.seconds, last.peak_bytes, last.loss) == (1, (0.5,) * 5, 7, 3.0)
    assert last.more == {"accumulator": "fp32, I"}


def test_what_does_not_fit_the_time_is_left_out_and_named(tmp_path: Path) -> None:
    ranks = Ranks()
    race = Race(ranks, 0.0, tmp_path / "race.jsonl", say=lambda line: None)  # type: ignore[arg-type]
    race.run(["floor", "paro_iig"], ["gpt2-medium"], [8], 1)
    assert not ranks.asked
    assert [r.job.contestant for r in race.records] == ["floor", "paro_iig", "paro_iig", "paro_iig"]
    assert all(r.status.endswith("s expected, 0 s left") for r in race.records)


def test_a_job_that_the_end_of_the_time_cuts_off_has_not_failed(tmp_path: Path) -> None:
    ranks = Ranks()
    race = Race(ranks, 60, tmp_path / "race.jsonl", say=lambda line: None)  # type: ignore[arg-type]

    def call(function: str, **options: Any) -> None:
        race._deadline = 0.0
        raise RankFailed("Timeout", "60 s were not enough")

    ranks.call = call  # type: ignore[assignment, method-assign]
    cut_off = race.do(Job("ddp", "gpt2-medium", 8, 1, 1))
    assert cut_off.status == "left out: not done when the time was over"


# ---- rows, ratios and bars -----------------------------------------------------------------------------------


def test_a_row_is_one_configuration_and_its_range_that_of_the_repeats() -> None:
    records = [record("paro_iig", seconds, blocks, 0, peak=9) for blocks, seconds in ((1, 1.1), (2, 0.8))]
    records += [record("paro_iig", seconds, 2, turn, peak=5) for turn, seconds in ((1, 0.7), (2, 0.9), (3, 0.75))]
    records += [record("ddp", 0.3, 1, repeat=0), record("fsdp_full", 0.0, status="out of memory")]
    rows = rows_of(records, "gpt2-medium", 8)
    assert list(rows) == ["ddp", "paro_iig"]
    row = rows["paro_iig"]
    assert (row.blocks, row.step_s, row.range_s, row.repeats, row.peak_bytes) == (2, 0.75, (0.7, 0.9), 3, 5 * GIB)
    assert row.scouted_s == {1: 1.1, 2: 0.8}
    assert rows["ddp"].repeats == 0


def table() -> list[Record]:
    times = {"floor": (0.5, 6), "legs": (0.2, 1), "fsdp_full": (4.4, 7), "fsdp_hybrid": (1.7, 8)}
    times |= {"fully_shard_2d": (1.5, 6.5), "paro_iig": (0.78, 6), "paro_nig": (0.75, 7), "paro_iig_low": (0.8, 5.5)}
    times |= {"paro_ggg": (3.0, 5.7)}
    return [record(name, seconds, peak=peak) for name, (seconds, peak) in times.items()]


def test_bars_between_uneven_hosts() -> None:
    rows = rows_of(table(), "gpt2-medium", 8)
    bars = {bar.text: bar for bar in uneven_bars(rows, "gpt2-medium", 8, hosts=2, gpus=2)}
    values = {text: bar.value for text, bar in bars.items()}
    assert values == {
        "best PaRO, times as fast as FSDP FULL_SHARD": pytest.approx(4.4 / 0.75),
        "best PaRO, times as fast as the best HSDP": pytest.approx(1.5 / 0.75),
        "paro_iig, memory of fully_shard 2-D": pytest.approx(6 / 6.5),
        "paro_iig accumulating in bf16, as fully_shard 2-D does, memory of that": pytest.approx(5.5 / 6.5),
        "paro_iig, memory of FSDP HYBRID_SHARD": pytest.approx(6 / 8),
        "paro_ggg, times as fast as FSDP FULL_SHARD": pytest.approx(4.4 / 3.0),
        "paro_ggg, memory of FSDP FULL_SHARD": pytest.approx(5.7 / 7),
        "best PaRO, of compute floor + legs": pytest.approx(0.75 / 0.7),
    }
    assert all(bar.reached for bar in bars.values())
    slower = rows_of([*table()[:-3], table()[-2], record("paro_ggg", 4.0, peak=6.0)], "gpt2-medium", 8)
    reached = [bar.reached for bar in uneven_bars(slower, "gpt2-medium", 8, hosts=2, gpus=2)]
    assert reached == [True, False, True, True, True, False, False, True]
    assert uneven_bars(rows, "gpt2-medium", 1, hosts=2, gpus=2) == []
    needed = [bar.needed for bar in uneven_bars(rows, "gpt2-medium", 8, hosts=4, gpus=2)][:2]
    assert needed == [9.0, 2.2]


@pytest.mark.parametrize("model", ["llama-1b", "llama-1b-mb8"])
def test_the_bar_of_the_larger_model_is_the_floor_alone(model: str) -> None:
    rows = rows_of([record("floor", 1.0, model=model), record("paro_iig", 1.12, model=model)], model, 8)
    (bar,) = uneven_bars(rows, model, 8, hosts=2, gpus=4)
    assert (bar.value, bar.reached) == (pytest.approx(1.12), False)
    assert uneven_bars(rows, model, 8, hosts=2, gpus=2) == []


def test_settings_with_bars_have_them() -> None:
    assert len(SETTINGS) == 5
    assert all(uneven_bars({}, *setting) for setting in SETTINGS)


def test_a_bar_without_its_rows_is_neither_reached_nor_missed() -> None:
    rows = rows_of([record("paro_ggg", 1.0), record("fully_shard_1d", 1.05, peak=0.9)], "gpt2-medium", 8)
    reached = {bar.text: bar.reached for bar in even_bars(rows)}
    assert reached == {
        "paro_ggg, times as fast as fully_shard_1d": True,
        "paro_ggg, memory of fully_shard_1d": False,
        "paro_nng, times as fast as ddp_zero": None,
        "paro_nng, memory of ddp_zero": None,
        "paro_nnn, times as fast as ddp": None,
        "paro_nnn, memory of ddp": None,
    }


def test_races_of_one_setup_are_joined_and_all_of_it_is_json() -> None:
    two = {"device": "none", "hosts": 2, "ranks_per_host": 2, "gpus": 2, "network": "none"}
    left_out = record("ddp", 0.0, status="left out: 9 s expected, 1 s left")
    report = make_report([(two, table()[:4]), (two | {"hosts": 4}, table()), (two, [*table()[4:], left_out])])
    assert json.loads(json.dumps(report)).keys() == {"setups"}
    joined, other = report["setups"]
    assert (joined["setup"]["races"], other["setup"]["races"]) == (2, 1)
    (joined_table,) = joined["tables"]
    by_name = {row["contestant"]: row for row in joined_table["rows"]}
    assert by_name["paro_iig"]["times_full_shard"] == pytest.approx(4.4 / 0.78)
    assert by_name["paro_iig"]["times_best_hsdp"] == pytest.approx(1.5 / 0.78)
    assert [job["contestant"] for job in joined["not_measured"]] == ["ddp"]
    assert all(bar["reached"] is not None for bar in joined_table["bars"])


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    network = Network(Topology(4, 2), inter=1e9, intra=1e12)
    work = workload("tiny-gpt2", 2, 0.0, "bf16-mixed")
    flat = cost(Partition.parse("ggg"), work, network, "flat").step_s
    records = [record("fsdp_full", 2 * flat, model="tiny-gpt2", accumulate=2)]
    (row,) = compare({"tiny-gpt2": 0.0}, records, network, "bf16-mixed")
    assert row["predicted_s"] == pytest.approx(flat)
    assert row["error"] == pytest.approx(-0.5)
    assert row["parameters"] == work.parameters == sum(p.numel() for p in build("tiny-gpt2", CPU).parameters())


# ---- hosts without GPUs --------------------------------------------------------------------------------------


def test_without_root_hosts_fall_back_to_loopback_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with namespaces.hosts(2, mbit=100) as network:
        assert network.description.startswith("loopback, no slow link: no network namespaces here (that needs root")
        assert (network.prefixes, network.interface, network.address) == (None, "lo", "127.0.0.1")


@pytest.mark.network
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root and iproute2")
def test_three_hosts_reach_each_other_through_shaped_links_and_are_gone_afterwards() -> None:
    def said(command: list[str]) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout

    with namespaces.hosts(3, mbit=77) as network:
        if network.prefixes is None:
            pytest.skip(network.description)
        names = [prefix[-1] for prefix in network.prefixes]
        assert len(set(names)) == 3
        listen = "import socket; s = socket.create_server(('', 4321)); print(flush=True); s.accept()[0].sendall(b'x')"
        talk = f"import socket; print(socket.create_connection(('{network.address}', 4321)).recv(1))"
        for prefix in network.prefixes[1:]:
            command = [*network.prefixes[0], sys.executable, "-c", listen]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
                server.stdout.readline()
                assert said([*prefix, sys.executable, "-c", talk]) == "b'x'\n"
        for prefix in network.prefixes:
            assert "rate 77Mbit" in said([*prefix, "tc", "qdisc", "show", "dev", network.interface])
    assert not set(names) & set(said(["ip", "netns", "list"]).split())


# ---- real ranks ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_ranks_train_alike_and_start_anew_after_a_failure(tmp_path: Path) -> None:
    options = {"model": "tiny-gpt2", "accumulate": 2, "warmup": 1, "measured": 1}
    with Cluster(hosts=2, per_host=1, gpus=0, log=tmp_path / "ranks.log") as cluster:
        losses = {}
        for name, blocks in (("paro_nig", 1), ("fully_shard_1d", 2)):
            ranks = cluster.call("benchmarks.lab.train:measure", contestant=name, blocks=blocks, **options)
            assert [len(rank["seconds"]) for rank in ranks] == [1, 1]
            losses[name] = [rank["loss"] for rank in ranks]
            assert all(rank["loss"] < rank["first_loss"] for rank in ranks)
        assert losses["paro_nig"] == pytest.approx(losses["fully_shard_1d"], rel=1e-5)
        assert losses["paro_nig"][0] != losses["paro_nig"][1], "ranks have batches of their own"
        assert cluster.starts == 1
        with pytest.raises(RankFailed, match="KeyError: rank [01]: 'nobody'"):
            cluster.call("benchmarks.lab.train:measure", contestant="nobody", blocks=1, **options)
        assert not cluster.is_running


def test_parts_of_a_step_are_told_apart() -> None:
    first = {"first forward": 1, "earlier backward": 2, "later forward": 3, "last backward": 4, "update": 5}
    assert by_phase([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], accumulate=2) == first
    assert by_phase([1, 2, 3], accumulate=1) == {"first forward": 1, "last backward": 2, "update": 3}
