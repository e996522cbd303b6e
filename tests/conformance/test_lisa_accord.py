"""Ranks that were asked for different things say so, all of them, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Silent, loader, quiet
from tests.distributed.lisa import rank
from tests.distributed.pool import Pool, WorkerError


class HalfFrozen(Silent):
    """On rank 1 without a layer."""

    def __init__(self) -> None:
        super().__init__()
        if rank() == 1:
            self.layers[1].requires_grad_(False)


def _fit(strategy: str, build: Any, options: dict[str, Any], other: dict[str, Any]) -> None:
    lisa = LISA(**{**options, **(other if rank() == 1 else {})})
    quiet(callbacks=[lisa], strategy=strategy, devices=4).fit(build(), loader(2))


def _messages(pool: Pool, *args: Any) -> list[str]:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fit, *args)
    return [str(message) for message in caught.value.messages()]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("paro_nig", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_layers", (2, 3)), ("interval", (2, 3)), ("state_policy", ("keep", "drop_frozen")),
        ("sampler", ("uniform", "cyclic")), ("warmup", (0, 1)),
    ],
)  # fmt: skip
def test_arguments(pool: Pool, strategy: str, name: str, values: tuple[Any, Any]) -> None:
    messages = _messages(pool, strategy, Silent, {name: values[0]}, {name: values[1]})
    expected = f"ValueError: ranks disagree on LISA's {name}: {values[0]} on rank 0, {values[1]} on rank 1. HINT: "
    assert all(message.startswith(expected) for message in messages), messages


def test_models(pool: Pool) -> None:
    for message in _messages(pool, "ddp", HalfFrozen, {}, {}):
        assert (
            "ranks disagree on LISA's model: 'layers.1.inner.weight' 42 on rank 0, 'layers.1.inner.weight' m" in message
        )


def test_what_one_rank_refuses(pool: Pool) -> None:
    first, second, *_ = _messages(pool, "ddp", Silent, {}, {"num_layers": 9})
    assert second.startswith("ValueError: num_layers=9, but there are 5 layers")
    assert first.startswith("ValueError: rank 1: num_layers=9, but there are 5 layers")


def test_a_seed_of_ones_own_is_that_of_rank_zero(pool: Pool) -> None:
    pool.run(_fit, "ddp", Silent, {"seed": 1}, {"seed": 2})
