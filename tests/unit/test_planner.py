"""The guideline: the paper's own case, closed forms, and what a plan is made of."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from lightning_paro.planner import (
    Network,
    StateBytes,
    Workload,
    cost,
    draw,
    draw_scaling,
    hpz,
    make_plan,
    scale,
    scaling_table,
    table,
    write_csv,
    write_json,
)  # fmt: skip
from lightning_paro.topology import Partition, Topology
from tests.distributed.test_bytes import TOPOLOGIES, expected_bytes, uneven_model, unit_sizes

PAPER = Network(Topology(32, 8), inter=80e9 / 8, intra=2000e9 / 8)
PAPER_BYTES = StateBytes(gradients=2, copied=0)
SEVEN_B = Workload(7e9, accumulate=10, sizes=PAPER_BYTES)


def _paper(parameters: float, trained: float = 1.0) -> Workload:
    return Workload(parameters, parameters * trained, accumulate=10, sizes=PAPER_BYTES)


def _cost(partition: str, workload: Workload = SEVEN_B, network: Network = PAPER, algorithm: str = "paro-cc"):
    return cost(Partition.parse(partition), workload, network, algorithm)


SCENARIOS = {
    "7B": _paper(7e9),
    "65B": _paper(65e9),
    "7B, 1/16 trained": _paper(7e9, 1 / 16),
    "65B, 1/16 trained": _paper(65e9, 1 / 16),
    "65B, 3/1000 trained": _paper(65e9, 3 / 1000),
}
RAN = ["nii", "nig", "ngg", "ing", "iii", "iig", "igg", "ggg"]  # NN* did not fit beside the activations
# PaRO, section 4: what it measured, the faster before the slower.
MEASURED = [  # scenario, faster, slower
    ("7B", "iig", "ggg"),
    ("7B", "nii", "ngg"),
    ("65B", "iig", "ggg"),
    ("7B, 1/16 trained", "nig", "ngg"),
    ("7B, 1/16 trained", "nii", "ngg"),
    ("65B, 1/16 trained", "iii", "ggg"),
    ("65B, 1/16 trained", "iig", "ggg"),
    ("65B, 3/1000 trained", "ing", "ggg"),
]
# What it recommends, NII, IIG and III at 7B, and the formulas do not say.
DISAGREES = [
    ("7B", "iig", "nig"),  # recommended NII, IIG, III; by the formulas NIG and ING come before IIG
    ("7B", "iig", "ing"),
]


@pytest.mark.parametrize(("scenario", "faster", "slower"), MEASURED)
def test_the_formulas_rank_what_the_paper_measured_as_it_did(scenario: str, faster: str, slower: str) -> None:
    workload = SCENARIOS[scenario]
    assert _cost(faster, workload).comm_s < _cost(slower, workload).comm_s


@pytest.mark.parametrize(("scenario", "faster", "slower"), DISAGREES)
def test_where_the_formulas_differ_from_what_the_paper_recommends(scenario: str, faster: str, slower: str) -> None:
    workload = SCENARIOS[scenario]
    assert _cost(faster, workload).comm_s > _cost(slower, workload).comm_s


def test_what_fits_at_65b_is_what_the_paper_could_run() -> None:
    fitting = {str(row.partition) for row in make_plan(SCENARIOS["65B"], PAPER, 80e9).rows if row.fits}
    assert fitting & set(RAN) == {"iig", "igg", "ggg"}
    assert str(make_plan(SCENARIOS["65B"], PAPER, 80e9).recommended.partition) == "iig"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_first_of_those_it_ran_is_one_that_the_paper_recommends(scenario: str) -> None:
    rows = [row for row in make_plan(SCENARIOS[scenario], PAPER, 80e9).rows if str(row.partition) in RAN]
    first, second = (str(row.partition) for row in rows[:2])
    expected = {  # NIG is NII's time with less memory, ING follows from few trained parameters
        "7B": ("nig", "nii"),
        "65B": ("iig", "igg"),
        "7B, 1/16 trained": ("nig", "nii"),
        "65B, 1/16 trained": ("ing", "iig"),
        "65B, 3/1000 trained": ("ing", "iig"),
    }
    assert (first, second) == expected[scenario]


def test_by_the_formulas_alone_the_fastest_at_7b_keeps_parameters_and_gradients_whole() -> None:
    order = [str(row.partition) for row in make_plan(SEVEN_B, PAPER, 80e9).rows]
    assert order[:2] == ["nng", "nni"]
    crowded = make_plan(replace(SEVEN_B, activations=50e9), PAPER, 80e9)
    assert str(crowded.recommended.partition) == "nig", "activations decide, as in the paper"


def test_one_gigabyte_a_second_and_round_numbers_by_hand() -> None:
    # 2 groups of 2, 8e9 bytes on the wire: inside 8e9 / 2 / 4e9 = 1 s; a column, with a card each, 4e9 / 2 / 1e9 = 2 s
    network = Network(Topology(4, 2), inter=1e9, intra=4e9, nic="gpu")
    workload = Workload(4e9, accumulate=3, sizes=PAPER_BYTES)
    spent = _cost("iig", workload, network)
    assert (spent.gather_s, spent.reduce_s, spent.sync_g_s, spent.sync_p_s) == (6, 3, 2, 2)
    spent = _cost("ggg", workload, network)
    assert (spent.gather_s, spent.reduce_s, spent.sync_g_s, spent.sync_p_s) == (18, 9, 0, 0)
    spent = _cost("nnn", workload, network)
    assert (spent.gather_s, spent.reduce_s, spent.sync_g_s, spent.sync_p_s) == (0, 0, 6, 0)
    assert _cost("nnn", workload, network, "flat").comm_s == 2 * 8e9 * 3 / 4 / 1e9
    assert _cost("ini", workload, network).sync_g_s == 1 + 2 * 2
    shared = replace(network, nic="host")
    assert _cost("iig", workload, shared).sync_g_s == 4, "two columns through one card"
    assert hpz(workload, network).gather_s == 3 * (8e9 * 3 / 4 / 1e9 + 1)
    assert hpz(workload, network).state_bytes == 16 * 4e9 / 4 + 8e9 / 2


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("partition", [str(partition) for partition in Partition.valid()])
def test_what_it_counts_is_what_an_engine_was_seen_to_send(
    partition: str, topology: tuple[int, int], micro_batches: int
) -> None:
    _, elements, trained = zip(*(units := unit_sizes(uneven_model())), strict=True)
    (rest,) = (size for name, size, _ in units if name == "rest")
    sizes = StateBytes.of("32-true")
    workload = Workload(sum(elements), sum(trained), micro_batches, rest=rest, sizes=sizes)
    ranks = Topology(topology[0] * topology[1], topology[1])
    slow, endless = 1.0, math.inf  # a byte takes a second on the links that count
    inside = _cost(partition, workload, Network(ranks, endless, slow, "gpu")).comm_s
    between = _cost(partition, workload, Network(ranks, slow, endless, "gpu")).comm_s
    expected = expected_bytes(partition, topology, micro_batches, width=4, keeps_last=False)
    assert (inside, between) == expected


def test_memory_is_state_and_what_is_in_motion_and_activations() -> None:
    sizes = StateBytes(2, 4, 12, 2, 2)
    workload = Workload(1000, 500, rest=100, largest_unit=60, bucket_bytes=0, activations=7, sizes=sizes)
    network = Network(Topology(4, 2), 1, 1)
    state = 2 * 1000 / 2 + 4 * 500 / 2 + 12 * 500 / 4
    assert _cost("iig", workload, network).state_bytes == state
    assert _cost("iig", workload, network).memory_bytes == state + 2 * (100 + 2 * 60) + 2 * (3 * 60 / 2) + 7
    wide = replace(workload, bucket_bytes=140)
    assert _cost("iig", wide, network).memory_bytes == state + 2 * (100 + 2 * 70) + 2 * (3 * 70 / 2) + 7
    all_of_it = replace(workload, bucket_bytes=10_000)
    assert _cost("iig", all_of_it, network).memory_bytes == state + 2 * 1000 + 2 * 500 + 7
    assert _cost("nng", workload, network).memory_bytes == 2 * 1000 + 4 * 500 + 12 * 500 / 4 + 7


@pytest.mark.parametrize(
    ("name", "d"), [("ggg", (4, 4, 4)), ("gng", (4, 1, 4)), ("iii", (2, 2, 2)), ("nnn", (1, 1, 1))]
)
def test_masters_take_the_place_of_parameters_that_are_cut_alike(name: str, d: tuple[int, int, int]) -> None:
    network = Network(Topology(4, 2), 1, 1)
    copied = 0 if name == "nnn" else 2 * 500  # parameters that are never whole have no copy beside their masters
    state = (2 * 1000 - copied) / d[0] + 4 * 500 / d[1] + 12 * 500 / d[2]
    assert _cost(name, Workload(1000, 500, sizes=StateBytes(2, 4, 12, 2, 2, 2)), network).state_bytes == state
    single = Workload(1000, 500, sizes=StateBytes.of("32-true"))
    assert _cost(name, single, network).state_bytes == 4 * 1000 / d[0] + 4 * 500 / d[1] + 8 * 500 / d[2]


@pytest.mark.parametrize(
    ("precision", "arguments", "sizes"),
    [
        ("bf16-mixed", {}, (2, 4, 12, 2, 2, 2)),
        ("bf16-mixed", {"grad_dtype": "bfloat16", "reduce_dtype": "float32"}, (2, 2, 12, 4, 4, 2)),
        ("bf16-true", {}, (2, 2, 4, 2, 2, 0)),
        ("16-mixed", {}, (2, 4, 12, 2, 4, 2)),
        ("32-true", {}, (4, 4, 8, 4, 4, 0)),
        ("64-true", {}, (8, 8, 16, 8, 8, 0)),
    ],
)
def test_bytes_of_a_precision(precision: str, arguments: dict[str, str], sizes: tuple[int, ...]) -> None:
    assert StateBytes.of(precision, **arguments) == StateBytes(*sizes)


def test_step_time_is_the_longer_of_communication_and_computation_and_ties_go_by_memory() -> None:
    busy = replace(SEVEN_B, compute=5.0)  # hides all communication
    plan = make_plan(busy, PAPER, 80e9)
    assert {row.cost.step_s for row in plan.rows} == {50.0}
    memories = [row.cost.memory_bytes for row in plan.rows if row.fits]
    assert memories == sorted(memories)
    assert str(plan.recommended.partition) == "ggg"


def test_what_is_sent_once_a_step_hides_behind_one_micro_batch() -> None:
    """Seconds by hand: 2 hosts of 2, one byte a parameter, 1 s for the bytes of a tensor between hosts."""
    sizes = StateBytes(1, 1, 1, 1, 1, 0)
    network = Network(Topology(4, 2), inter=2.0, intra=4.0, nic="gpu")
    work = Workload(8, accumulate=5, compute=1.5, sizes=sizes)
    nig = cost(Partition.parse("nig"), work, network)  # reduces: 1 s each, hidden; then 1 + 1 + 1 s between and inside
    assert (nig.reduce_s, nig.sync_g_s, nig.sync_p_s) == (5.0, 1.0, 2.0)
    assert nig.step_s == 4 * 1.5 + (1.0 + 3.0)
    iig = cost(Partition.parse("iig"), work, network)  # 3 s for two gathers and a reduce: never hidden
    assert iig.step_s == iig.comm_s == 5 * 3.0 + 2.0
    assert cost(Partition.parse("nig"), replace(work, compute=4.0), network).step_s == 5 * 4.0


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    plan = make_plan(SEVEN_B, PAPER, 80e9)
    frontier = plan.frontier()
    for row in plan.rows:
        beaten = any(
            other.cost.memory_bytes < row.cost.memory_bytes and other.cost.step_s < row.cost.step_s * (1 - 1e-6)
            for other in plan.rows
        )
        assert not (beaten and row in frontier)
    assert [str(row.partition) for row in frontier] == ["ggg", "igg", "iig", "nig", "nng"]


def test_nothing_that_fits_is_no_recommendation() -> None:
    plan = make_plan(_paper(65e9), PAPER, 10e9)
    assert plan.recommended is None
    assert not any(row.fits for row in plan.rows)


def test_five_percent_are_kept_free() -> None:
    needed = _cost("nng").memory_bytes
    assert str(make_plan(SEVEN_B, PAPER, needed * 1.0501).recommended.partition) == "nng"
    assert str(make_plan(SEVEN_B, PAPER, needed * 1.0499).recommended.partition) != "nng"


@pytest.mark.parametrize(("world", "group", "runs"), [(8, 8, "iii"), (8, 1, "nng"), (1, 1, "nnn")])
def test_a_topology_without_a_rung(world: int, group: int, runs: str) -> None:
    network = Network(Topology(world, group), 1e9, 4e9)
    (row,) = (row for row in make_plan(SEVEN_B, network, 1e12).rows if str(row.partition) == "iig")
    assert str(row.runs_as) == runs
    assert row.cost == _cost(runs, SEVEN_B, network)


def test_scaling_keeps_group_and_work() -> None:
    plans = scale(SEVEN_B, PAPER, 80e9, [16, 64, 4096])
    assert [plan.network.topology for plan in plans] == [Topology(16, 8), Topology(64, 8), Topology(4096, 8)]

    def seconds(partition: str) -> list[float]:
        return [row.cost.step_s for plan in plans for row in plan.rows if str(row.partition) == partition]

    def by_hand(groups: int) -> float:
        inside, between = 14e9 * 7 / 8 / 250e9, 14e9 / 10e9 * (groups - 1) / groups
        return 30 * inside + 2 * between

    assert seconds("iig") == pytest.approx([by_hand(2), by_hand(8), by_hand(512)])
    assert seconds("iig") == sorted(seconds("iig"))
    with pytest.raises(ValueError, match="group_size=8 does not divide world_size=12"):
        scale(SEVEN_B, PAPER, 80e9, [12])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network(Topology(4, 2), 0, 1), "bandwidth inter must be at least 1 byte per second, got 0"),
        (lambda: Network(Topology(4, 2), 1e9, math.nan), "bandwidth intra must be at least"),
        (lambda: Network(Topology(4, 2), 1, 1, "node"), "nic='node' is not understood"),
        (lambda: Workload(0), "number of parameters must be above 0"),
        (lambda: Workload(math.inf), "number of parameters must be above 0 and at most 1e[+]30, got inf"),
        (lambda: Workload(10, 11), "11 of 10 parameters cannot be trained"),
        (lambda: Workload(10, accumulate=0), "at least 1 micro-batch"),
        (lambda: Workload(10, compute=-1), "compute must be between 0 and 1e[+]30, got -1"),
        (lambda: Workload(10, compute=math.inf), "compute must be between 0 and 1e[+]30, got inf"),
        (lambda: Workload(10, activations=math.nan), "activations must be between 0 and"),
        (lambda: make_plan(SEVEN_B, PAPER, -1), "memory of a rank must be positive"),
        (lambda: StateBytes.of("8-bit"), "precision='8-bit' is not known"),
        (lambda: StateBytes.of("32-true", grad_dtype="int8"), "grad_dtype='int8' does not fit precision '32-true'"),
        (
            lambda: StateBytes.of("64-true", reduce_dtype="bfloat16"),
            "does not fit precision '64-true': expected 'float64'",
        ),
    ],
)
def test_numbers_that_make_no_sense(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_as_large_as_can_be_are_planned_all_the_same() -> None:
    plan = make_plan(Workload(1e30, compute=1e30, accumulate=10**6), Network(Topology(32, 8), 1, 1), 80e9)
    assert len(plan.rows) == 14
    assert all(math.isfinite(row.cost.step_s) for row in [*plan.rows, *plan.peers])


def test_what_is_written_is_what_was_planned(tmp_path: Path) -> None:
    plan = make_plan(SEVEN_B, PAPER, 80e9)
    write_json(plan, tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["recommended"] == "nng"
    assert written["inputs"]["world_size"] == 32
    for row, entry in zip(plan.rows, written["rows"], strict=True):
        assert entry["partition"] == str(row.partition)
        assert entry["memory_bytes"] == row.cost.memory_bytes
        assert entry["comm_s"] == pytest.approx(
            sum(entry[part] for part in ("gather_s", "reduce_s", "sync_g_s", "sync_p_s"))
        )
        assert entry["tps"] == pytest.approx(math.log(1 / entry["step_s"]))
    write_csv([plan, plan], tmp_path / "plan.csv")
    with (tmp_path / "plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 28
    assert [row["partition"] for row in rows if row["recommended"] == "True"] == ["nng", "nng"]


def test_tables_and_pictures_show_every_partition(tmp_path: Path) -> None:
    plans = scale(SEVEN_B, PAPER, 80e9, [16, 32])
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(plans[1]), scaling_table(plans))
    text = console.export_text()
    for partition in Partition.valid():
        assert text.count(f" {partition} ") == text.count(f"paro_{partition} ") == 1
    assert "recommended" in text
    for name, function, what in (("one", draw, plans[0]), ("many", draw_scaling, plans)):
        figure = Figure()
        axes = figure.add_subplot()
        function(what, axes)
        figure.savefig(tmp_path / f"{name}.png")
        told = [*(text.get_text() for text in axes.texts), *axes.get_legend_handles_labels()[1], axes.get_title()]
        drawn = {name for text in told for name in text.split(": ")[-1].split(", ")}
        assert {"nng", "iig", "ggg"} <= drawn
        assert axes.get_title() == ("" if function is draw else "not shown, for they fit nowhere: nnn")
