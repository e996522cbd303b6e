"""The trace sees every entry into the engine that training makes."""

from __future__ import annotations

from benchmarks.lab.tracing import ENTRIES, clocked
from tests.distributed.loops import Sharded, Stack, accumulate, adamw
from tests.distributed.pool import Pool


def _calls() -> dict[str, float]:
    with clocked() as spent:
        loop, model = Sharded("iig"), Stack().double()
        loop.shard(model)
        optimizer = loop.attach(adamw(model))
        for entry in spent.values():
            entry[:] = [0, 0.0]
        accumulate(loop, model, optimizer, 2, 3)
        loop.norm(optimizer)
        calls = {name: count for name, (count, _) in spent.items()}
        loop.close()
    return calls


def test_every_entry_is_counted(pool: Pool) -> None:
    for calls in pool.run(_calls):
        assert len(calls) == len(ENTRIES)
        assert calls["Unit.before_forward"] == calls["Unit.after_forward"] == calls["Unit.reach"] == 2 * 3 * 3
        assert calls["Engine.update"] == 2
        assert calls["Engine.backward_end"] == 6
        assert all(calls.values())
