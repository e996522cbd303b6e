"""The lab of benchmarks/lisa_paro.py: bytes between hosts by the formula, what a sleep loses, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab.cluster import Cluster, RankFailed
from benchmarks.lab.lisa_paro import between_hosts, row_of, trained
from benchmarks.lab.lisa_paro_masters import ARMS, Losses
from benchmarks.lab.lisa_paro_page import LISA_PARO
from benchmarks.lab.models import MODELS, build
from benchmarks.lab.pictures import digest
from benchmarks.lisa_paro import keep, race
from lightning_paro import ParoStrategy
from lightning_paro.topology import Topology
from tests.distributed.lisa import INTERVAL, train
from tests.distributed.test_lisa_masters import PERIODS, Ones, by_period

MIB = 2**20
# Of the model "tiny-gpt2": four blocks of width 64, 64 tokens, 16 positions.
BLOCK, ENDS = 12 * 64 * 64 + 13 * 64, (64 + 16 + 2) * 64
SETUP = {
    "device": "Made Up 1", "versions": {"torch": "9.8"}, "hosts": 2, "ranks_per_host": 2, "gpus": 2, "network": "slow",
}  # fmt: skip


# ---- between hosts -------------------------------------------------------------------------------------------


def test_lisa_trains_two_blocks_and_what_is_outside_of_them() -> None:
    assert trained("tiny-gpt2", lisa=False) == ENDS + 4 * BLOCK
    assert trained("tiny-gpt2", lisa=True) == ENDS + 2 * BLOCK


def test_the_small_model_has_the_shape_of_the_large_one() -> None:
    shares = {}
    for name in ("gpt2-medium", "cpu-gpt2-medium"):
        model: Any = build(name, torch.device("meta"))
        shares[name] = model.transformer.wte.weight.numel() / sum(p.numel() for p in model.parameters())
        assert MODELS[name].config["n_layer"] == 24
    assert shares["cpu-gpt2-medium"] == pytest.approx(shares["gpt2-medium"], abs=0.01)


@pytest.mark.parametrize(("ranks", "expected"), [(4, 2000), (6, 2 * 2000 * 2 / 3), (2, 0)])
def test_a_rank_sends_a_part_of_its_groups_sums_and_as_many_new_values(ranks: int, expected: float) -> None:
    """Of 4000 bytes a group of two has 2000 a rank, of which (ng - 1) / ng leave the host, twice."""
    assert between_hosts(1000, 4, Topology(ranks, 2)) == pytest.approx(expected)


def rank(**other: Any) -> dict[str, Any]:
    same = {"seconds": [1.0, 2.0, 3.0], "inter_bytes": 10.0, "intra_bytes": 30.0, "link_bytes": 21.0, "peak_bytes": 5}
    return same | {"held": {"parameters": 2, "master": 5}, "switches": 1, "loss": 2.5, **other}


def test_the_slowest_rank_of_a_step_counts_and_the_largest_of_what_is_held() -> None:
    slow = rank(seconds=[4.0, 1.0, 1.0], held={"parameters": 9, "master": 0}, peak_bytes=6)
    row = row_of("paro_iig", True, [[rank(), slow], [rank(), rank(link_bytes=99.0)], [rank(), rank()]], 9.5)
    assert row["seconds"] == [[4.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert (row["step_s"], row["range_s"]) == (2.0, [2.0, 3.0])
    assert (row["held_bytes"], row["peak_bytes"], row["inter_bytes"], row["formula_bytes"]) == (9, 6, 10.0, 9.5)
    assert row["link_bytes"] == 21.0, "of the first host"


class Ranks:
    """A cluster that answers by itself."""

    hosts, per_host, gpus, network, world_size = 2, 2, 0, "none", 4

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def call(self, function: str, **options: Any) -> list[dict[str, Any]]:
        if function.endswith(":describe"):
            return [{"device": "none"}]
        self.asked.append((options["strategy"], options["lisa"]))
        if self.asked[-1] == ("paro_iig", False):
            raise RankFailed("KeyError", "rank 1: 'x'")
        return [rank()] * 4


def test_all_take_turns_and_what_fails_is_named_and_not_tried_again(tmp_path: Path) -> None:
    ranks = Ranks()
    part = race(ranks, "tiny-gpt2", accumulate=2, repeats=2)  # type: ignore[arg-type]
    nig, iig = [("paro_nig", False), ("paro_nig", True)], [("paro_iig", False), ("paro_iig", True)]
    assert ranks.asked == [*nig, *iig, iig[1], nig[1], nig[0]]
    assert [(row["strategy"], row["lisa"]) for row in part["rows"]] == [*nig, iig[1]]
    assert part["failed"] == {"paro_iig": "KeyError: rank 1: 'x'"}
    assert [row["formula_bytes"] for row in part["rows"]] == [
        ENDS * 2 + BLOCK * 8,
        ENDS * 2 + BLOCK * 4,
        ENDS * 2 + BLOCK * 4,
    ]
    assert (part["parameters"], part["trained"]) == (ENDS + 4 * BLOCK, ENDS + 2 * BLOCK)
    assert part["setup"]["hosts"] == 2
    assert keep(part, tmp_path / "some.json") == json.loads((tmp_path / "some.json").read_text())


def test_a_cluster_takes_the_place_of_its_own_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for gpus, value in ((0, 1), (2, 2), (0, 3)):
        keep({"setup": SETUP | {"gpus": gpus}, "rows": [value]}, path)
    parts = json.loads(path.read_text())["setups"]
    assert [(part["setup"]["gpus"], part["rows"]) for part in parts] == [(2, [2]), (0, [3])]


@pytest.mark.full
def test_ranks_send_between_hosts_what_the_formula_says(tmp_path: Path) -> None:
    """Two hosts of one rank; flat buffers are padded by less than one in a hundred."""
    options = {"model": "tiny-gpt2", "accumulate": 2, "warmup": 2, "measured": 4}
    with Cluster(hosts=2, per_host=1, gpus=0, log=tmp_path / "ranks.log") as cluster:
        for strategy, lisa in (("paro_nig", False), ("paro_iig", True)):
            ranks = cluster.call("benchmarks.lab.lisa_paro:measure", strategy=strategy, lisa=lisa, **options)
            formula = between_hosts(trained("tiny-gpt2", lisa), 4, Topology(2, 1))
            for one in ranks:
                assert len(one["seconds"]) == 4
                assert one["switches"] == int(lisa)
                assert formula <= one["inter_bytes"] < 1.01 * formula
                assert one["link_bytes"] == 0, "loopback carries what stays on a host, too"
                assert one["loss"] < one["first_loss"]
            whole, state = (sum(one["held"][kind] for one in ranks) for kind in ("parameters", "optimizer"))
            assert whole >= 2 * 4 * trained("tiny-gpt2", lisa=False), "on a host of one rank parameters are whole"
            assert state == 2 * 4 * trained("tiny-gpt2", lisa), "of AdamW, once in the world"
            assert sum(one["held"]["gradients"] for one in ranks) >= 4 * trained("tiny-gpt2", lisa)


# ---- masters -------------------------------------------------------------------------------------------------


class Steps(Ones):
    """Weights of one go down by the rate; the numbers of bf16 below one are 2 ** -8 apart."""

    lr = 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    ("precision", "keep_master", "lr", "expected"),
    [
        ("bf16-mixed", False, 2**-12, 1.0),
        ("bf16-mixed", False, 2**-8, 0.0),
        ("bf16-mixed", False, 2**-8 * 5 / 12, 0.2),  # three steps are 1.25 of it, of which 0.25 are lost
        ("bf16-mixed", True, 2**-12, 0.0),
        ("32-true", False, 2**-12, 0.0),
    ],
)
def test_a_sleep_loses_what_bf16_does_not_hold(precision: str, keep_master: bool, lr: float, expected: float) -> None:
    class At(Steps):
        pass

    At.lr = lr
    losses = Losses()
    train(
        ParoStrategy("nnn", group_size=1), 1, steps=INTERVAL * len(PERIODS), accumulate=1, clip=None,
        precision=precision, callbacks=[losses], build=At, sampler=by_period, keep_master=keep_master,
    )  # fmt: skip
    assert len(losses.fractions) == 5
    assert losses.fractions == pytest.approx([expected] * 5, abs=1e-4)


# ---- the page ------------------------------------------------------------------------------------------------


def hosts_report() -> dict[str, Any]:
    row = {"range_s": [0.5, 2.0], "seconds": [], "switches": 0, "intra_bytes": 1e6, "link_bytes": 0, "loss": 1.0}
    row |= {"held_bytes": 3 * MIB, "peak_bytes": 0}
    rows = [
        row | {"strategy": name, "lisa": lisa, "step_s": step, "inter_bytes": sent, "formula_bytes": sent - 1e3}
        for name, lisa, step, sent in (
            ("paro_nig", False, 1.5, 8e6),
            ("paro_nig", True, 0.5, 2e6),
            ("paro_iig", True, 0.7, 2e6),
        )
    ]
    rows[1] |= {"switches": 2}
    part = {"setup": SETUP, "model": "tiny", "accumulate": 4, "layers": 2, "interval": 3, "repeats": 2, "steps": 6}
    part |= {"parameters": 10**7, "trained": 2 * 10**6, "rows": rows, "failed": {"paro_iig": "Timeout: late"}}
    return {"setups": [part]}


def masters_report() -> dict[str, Any]:
    losses = {"fp32": 2.0, "bf16-mixed, masters kept": 2.01, "bf16-mixed, masters dropped": 2.1}
    rows = [
        {"arm": vars(arm), "lr": lr, "seed": 0, "lost": [0.0, 0.0] if "dropped" not in arm.name else [0.4, 0.6],
         "before": 3.0, "loss": losses[arm.name]}
        for lr in (1e-5, 1e-4) for arm in ARMS
    ]  # fmt: skip
    setup = {"versions": {"torch": "9.8"}, "parameters": 10**6, "steps": 200, "sequences": 2, "length": 128}
    return {"setup": setup | {"layers": 2, "interval": 10, "held_out": 64}, "rows": rows}


REPORTS = {"lisa_paro": hosts_report(), "lisa_masters": masters_report()}


def test_lisa_stands_beside_the_same_strategy_without_it() -> None:
    tell, _ = LISA_PARO["lisa_paro"]
    text = "\n".join(tell(REPORTS["lisa_paro"], "lisa_paro"))
    assert "#### tiny, s = 4, 2 hosts × 2 ranks, 2 GPUs\n\nMade Up 1; between hosts: slow; torch 9.8.\n" in text
    assert "| paro_nig | all | 1.500 | 0.500 … 2.000 |  | 8.000 | 7.999 |  | 3.0 |" in text
    assert "| paro_nig | with LISA | 0.500 | 0.500 … 2.000 | 3.00 | 2.000 | 1.999 | 4.00 | 3.0 |" in text
    assert "| paro_iig | with LISA | 0.700 | 0.500 … 2.000 |  | 2.000 | 1.999 |  | 3.0 |" in text
    assert "Medians of 2 × 6 steps; in 2 of each 6 it switches." in text
    assert "* Not measured: paro_iig: Timeout: late.\n" in text
    assert "peak" not in text
    assert "link |" not in text


def test_what_is_lost_stands_beside_what_was_learnt() -> None:
    tell, _ = LISA_PARO["lisa_masters"]
    text = "\n".join(tell(REPORTS["lisa_masters"], "lisa_masters"))
    assert "| 1e-05 | 50.0% | 40.0% … 60.0% | 0.0% | 2.0000 | 2.0100 | 2.1000 | 99.0% | 90.0% |" in text
    assert "3.0000 at the start" in text


@pytest.mark.parametrize("name", LISA_PARO)
def test_pictures_are_small_and_say_what_they_were_drawn_from(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    for file, draw in LISA_PARO[name][1].items():
        draw(REPORTS[name], tmp_path / file)
        picture = (tmp_path / file).read_bytes()
        assert digest(REPORTS[name]).encode() in picture
        assert len(picture) < 100_000
