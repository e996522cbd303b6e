from __future__ import annotations

import pytest

from tests.distributed.loops import ALL, FEW, SOME


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """The oracles are tiny, and the ranks need the cores."""


def _or_others(chosen: tuple[str, ...], of: tuple[str, ...]) -> list[object]:
    """Some partitions by default, the others in the full run."""
    others = tuple(partition for partition in of if partition not in chosen)
    return [pytest.param(chosen, id=" ".join(chosen)), pytest.param(others, id="others", marks=pytest.mark.full)]


@pytest.fixture(params=_or_others(FEW, of=SOME))
def few(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Partitions for what is tested under many conditions."""
    return request.param


@pytest.fixture(params=_or_others(SOME, of=ALL))
def some(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Partitions for what may depend on each granularity."""
    return request.param
