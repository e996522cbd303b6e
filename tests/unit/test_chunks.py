"""How two-level collectives are cut up, what staging that takes, and that one rank needs no process group."""

from __future__ import annotations

import pytest
import torch

from lightning_paro.collectives import ChunkPlan, ProcessGroups, all_gather, all_reduce, broadcast, reduce_scatter, tune
from lightning_paro.collectives._chunks import DEFAULT_CHUNK_BYTES, pieces
from lightning_paro.collectives._legs import Legs
from lightning_paro.collectives._stages import SLOTS, gather, reduce, scatter
from lightning_paro.topology import Topology


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 160, 1000, 4097])
@pytest.mark.parametrize("longest", [0, 1, 16, 40, 999, 5000])
def test_pieces_are_all_there_and_nearly_of_one_length(length: int, longest: int) -> None:
    cuts = pieces(length, longest, 16)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(length))
    sizes = [cut.stop - cut.start for cut in cuts]
    if longest == 0:
        assert sizes == [length]
    elif length > longest:
        assert max(sizes) == sizes[0] <= max(longest, 16)
        assert all(size == sizes[0] and size % 16 == 0 for size in sizes[:-1])
        assert len(cuts) <= -(-length // (longest // 16 * 16 or 16))


def test_a_plan_takes_the_fastest_of_the_nearest_size() -> None:
    plan = ChunkPlan({"all_gather": {1000: {0: 1.0, 4: 2.0}, 100_000: {0: 3.0, 4: 2.0}}})
    assert [plan.chunk_bytes("all_gather", nbytes) for nbytes in (0, 1, 9000, 11_000, 10**9)] == [0, 0, 0, 4, 4]
    assert plan.chunk_bytes("broadcast", 1000) == DEFAULT_CHUNK_BYTES


def _alone(topology: Topology) -> ProcessGroups:
    return ProcessGroups(topology, 0, None, None, None, None, None)


@pytest.mark.parametrize("operation", [gather, scatter, reduce])
def test_staging_is_that_of_a_few_chunks_however_large_the_tensor(operation: object) -> None:
    legs = Legs(_alone(Topology(32, 8)))
    chunk_bytes, numel = 2**16, 32 * 2**14
    whole, part = torch.empty(numel), torch.empty(numel // 32)
    args = (whole,) if operation is reduce else (whole, part) if operation is gather else (part, whole)
    chunks, staging = operation(legs, *args, chunk_bytes)
    assert len(chunks) == whole.nbytes // 8 // chunk_bytes  # what crosses groups is an eighth
    held = sum(tensor.nbytes for tensor in staging)
    assert held == SLOTS * chunk_bytes * (1 if operation is reduce else 1 + 8)


def test_one_rank_needs_no_process_group() -> None:
    groups = ProcessGroups.create(Topology(1, 1))
    values, out = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    for algorithm in ("two-level", "flat"):
        for call in (
            lambda a: all_gather(out, values, groups, algorithm=a),
            lambda a: reduce_scatter(out, values, groups, algorithm=a, async_op=True).wait(),
        ):
            out.zero_()
            call(algorithm)
            assert torch.equal(out, values)
        all_reduce(values, groups, algorithm=algorithm)
        broadcast(values, 0, groups, algorithm=algorithm)
        assert values.tolist() == [0, 1, 2, 3, 4]
    assert groups.traffic.calls == groups.traffic.inter == groups.traffic.intra == 0
    assert tune(groups) == ChunkPlan({})
