"""Every partition trains as one process does on the whole batch: a cover by default, all in `make test-full`."""

from __future__ import annotations

from functools import cache
from itertools import cycle, product

import numpy as np
import pytest

from lightning_paro.collectives import ProcessGroups
from lightning_paro.topology import Topology
from tests.distributed import oracle
from tests.distributed.comparing import Values, differences
from tests.distributed.oracle import FACTORS, TOLERANCE, Case, Reference
from tests.distributed.pool import Pool

alone = cache(oracle.train_alone)


def _train_and_compare(pool: Pool, cases: list[Case]) -> None:
    assert cases
    expected: dict[Reference, Values] = {case.reference: alone(case.reference) for case in cases}
    for rank, wrong in enumerate(pool.run(oracle.failing, cases, expected)):
        assert not wrong, f"rank {rank}, {len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)


@pytest.mark.parametrize("accumulation", FACTORS["accumulation"])
@pytest.mark.parametrize("topology", FACTORS["topology"], ids="{0[0]}x{0[1]}".format)
def test_the_pairwise_cover_equals_one_process(pool: Pool, topology: tuple[int, int], accumulation: int) -> None:
    chosen = [c for c in oracle.pairwise() if (c.topology, c.accumulation) == (topology, accumulation)]
    _train_and_compare(pool, chosen)


@pytest.mark.full
@pytest.mark.parametrize("model", FACTORS["model"])
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("optimizer", FACTORS["optimizer"])
@pytest.mark.parametrize("accumulation", FACTORS["accumulation"])
@pytest.mark.parametrize("topology", FACTORS["topology"], ids="{0[0]}x{0[1]}".format)
def test_all_cases_equal_one_process(
    pool: Pool, topology: tuple[int, int], accumulation: int, optimizer: str, dtype: str, model: str
) -> None:
    rest = (topology, accumulation, optimizer, dtype, model)
    _train_and_compare(pool, [case for case in oracle.full() if case[1:] == rest])


def test_the_pairwise_cover_covers() -> None:
    chosen = oracle.pairwise()
    for first, second in product(FACTORS, FACTORS):
        if first != second:
            met = {(getattr(case, first), getattr(case, second)) for case in chosen}
            assert met == set(product(FACTORS[first], FACTORS[second])), (first, second)
    assert len(set(chosen)) == len(chosen) < len(oracle.full()) / 10


def _differing_from_ddp(partitions: tuple[str, ...], reference: Reference) -> list[str]:
    return list(oracle.differing_from_ddp(partitions, reference))


def test_every_partition_equals_ddp(pool: Pool, some: tuple[str, ...]) -> None:
    for wrong in pool.run(_differing_from_ddp, some, Reference(3, "adamw", "float64", "full")):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("model", FACTORS["model"])
def test_one_rank_without_a_process_group_trains_as_usual(model: str) -> None:
    groups = ProcessGroups.create(Topology(1, 1))
    settings = cycle(product(FACTORS["accumulation"], FACTORS["optimizer"]))
    for partition, (accumulation, optimizer) in zip(FACTORS["partition"], settings, strict=False):
        reference = Reference(accumulation, optimizer, "float64", model)
        values = oracle.train_sharded(partition, groups, reference)
        assert not differences(values, alone(reference), TOLERANCE["float64"]), (partition, reference)


def test_the_oracle_would_notice_a_difference() -> None:
    """A comparison that cannot fail would pass everything above."""
    right = alone(Reference(1, "sgd", "float64", "full"))
    name = "blocks.0.a.weight"
    assert not differences(right, right, 0.0)
    for spoil in (1 + 1e-9, np.nan, np.inf):
        wrong = {**right, name: right[name].copy()}
        wrong[name][0, 0] *= spoil
        wrong[name][0, 0] += 1e-9
        assert [text.split(":")[0] for text in differences(wrong, right, TOLERANCE["float64"])] == [name]
        assert differences(right, wrong, TOLERANCE["float64"])
    assert differences({}, right, 1.0)
    assert differences({**right, name: right[name].astype(np.float32)}, right, 1.0)
