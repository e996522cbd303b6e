"""The pool itself: a test harness that hides a failure would make every other test worthless."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.pool import WORLD_SIZE, Pool, WorkerError


def _sum_of_ranks() -> float:
    value = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(value)
    return value.item()


def _fail_on(ranks: set[int]) -> None:
    if torch.distributed.get_rank() in ranks:
        raise ValueError("as told")


def test_every_rank_takes_part(pool: Pool) -> None:
    assert pool.run(_sum_of_ranks) == [sum(range(WORLD_SIZE))] * WORLD_SIZE


def test_a_failure_on_all_ranks_is_reported_and_the_pool_lives_on(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fail_on, set(range(WORLD_SIZE)))
    assert caught.value.messages() == ["ValueError: as told"] * WORLD_SIZE
    assert pool.run(_sum_of_ranks)[0] == 6


def test_a_failure_on_one_rank_is_reported_and_the_pool_starts_anew() -> None:
    workers = Pool()
    with pytest.raises(WorkerError) as caught:
        workers.run(_fail_on, {2})
    assert caught.value.messages() == [None, None, "ValueError: as told", None]
    assert workers.run(_sum_of_ranks)[0] == 6
    workers.close()
