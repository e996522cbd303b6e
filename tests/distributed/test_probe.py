"""The probe of bandwidths, on gloo: what is measured where, and that the numbers belong together."""

from __future__ import annotations

from unittest import mock

import pytest

from lightning_paro.collectives import ProcessGroups
from lightning_paro.planner import Network, Probe, Sample, Workload, make_plan, probe
from lightning_paro.planner import _probe as module
from lightning_paro.topology import Topology
from tests.distributed.pool import WORLD_SIZE, Pool

SIZES = (1000, 2**16)


def _probe(group_size: int) -> Probe:
    return probe(ProcessGroups.create(Topology(WORLD_SIZE, group_size)), sizes=SIZES, show_progress=False)


@pytest.mark.parametrize(
    ("group_size", "links"),
    [
        (1, {"between, one column"}),
        (2, {"inside", "between, one column", "between, all columns", "all, one flat ring"}),
        (4, {"inside"}),
    ],
)
def test_it_measures_the_links_there_are(pool: Pool, group_size: int, links: set[str]) -> None:
    results = pool.run(_probe, group_size)
    assert all(result == results[0] for result in results), "the same on all ranks, to the bit"
    measured = results[0]
    assert {sample.links for sample in measured.samples} == links
    for sample in measured.samples:
        ranks = {"inside": group_size, "all, one flat ring": WORLD_SIZE}.get(sample.links, WORLD_SIZE // group_size)
        assert sample.nbytes >= SIZES[0]
        assert sample.seconds > 0
        assert sample.bandwidth * sample.seconds == pytest.approx(sample.nbytes * (ranks - 1) / ranks)
    counted = {(sample.links, sample.operation) for sample in measured.samples}
    assert len(measured.samples) == len(SIZES) * len(counted) == len(SIZES) * 2 * len(links)
    network = measured.network()
    plan = make_plan(Workload(1e6), network, memory=1e9)
    assert plan.recommended is not None
    assert (network.intra == float("inf")) == (group_size == 1)
    assert (network.inter == float("inf")) == (group_size == 4)
    assert 0 < network.globally(1e6, 1e6, "flat") < float("inf")
    assert 0 < network.globally(1e6, 1e6, "paro-cc") < float("inf")


def _probe_patiently(longest_s: float) -> Probe:
    with mock.patch.object(module, "LONGEST_S", longest_s):
        return _probe(2)


def test_what_would_take_seconds_is_left_out_on_all_ranks(pool: Pool) -> None:
    results = pool.run(_probe_patiently, 0.0)
    assert all(result == results[0] for result in results)
    assert len(results[0].samples) == 8
    assert len({sample.nbytes for sample in results[0].samples}) == 1
    assert all(bandwidth < float("inf") for bandwidth in (results[0].network().inter, results[0].network().intra))


def test_each_operation_counts_with_the_largest_size_it_was_measured_with() -> None:
    samples = (
        Sample("inside", "gather", 10, 1.0, 1e9),
        Sample("inside", "gather", 20, 1.0, 8e9),
        Sample("inside", "reduce", 10, 1.0, 4e9),
    )
    bandwidth = Probe(Topology(4, 2), "cpu", samples).bandwidth("inside")
    assert 1 / bandwidth == pytest.approx((1 / 8e9 + 1 / 4e9) / 2)


def test_the_mean_time_of_the_largest_size_counts_and_columns_and_ring_have_their_own() -> None:
    def sample(links: str, operation: str, nbytes: int, bandwidth: float) -> Sample:
        return Sample(links, operation, nbytes, 1.0, bandwidth)  # type: ignore[arg-type]

    measured = Probe(
        Topology(4, 2),
        "cpu",
        (
            sample("inside", "gather", 10, 1e9),  # too small to count
            sample("inside", "gather", 20, 6e9),
            sample("inside", "reduce", 20, 3e9),
            sample("between, one column", "gather", 20, 3e9),
            sample("between, all columns", "gather", 20, 2e9),
            sample("all, one flat ring", "reduce", 20, 5e9),
        ),
    )
    network = measured.network()
    bandwidths = (network.intra, network.inter, network.column, network.ring)
    assert bandwidths == pytest.approx((4e9, 3e9, 2e9, 5e9))
    assert network.between(8e9) == 8e9 / 2 / 2 / 2e9
    assert network.globally(8e9, 8e9, "flat") == 8e9 * 3 / 4 / 5e9
    assert Network(Topology(4, 2), inter=3e9, intra=4e9).globally(8e9, 8e9, "flat") == 8e9 * 3 / 4 / 3e9
