"""Collectives in two levels against torch's own over the world, and against sums that every rank can work out alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paro.collectives import (
    ChunkPlan,
    ProcessGroups,
    _compat,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    tune,
)
from lightning_paro.collectives._legs import Legs
from lightning_paro.collectives._stages import SLOTS
from lightning_paro.topology import Topology
from tests.distributed.pool import WORLD_SIZE, Pool
from tests.distributed.test_bytes import TOPOLOGIES, recording

SUMMED = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.complex64, torch.complex128,
)  # fmt: skip
MOVED = (*SUMMED, torch.bool, torch.int16, torch.float8_e4m3fn)
LENGTHS = (0, 1, 17, 130)
CHUNKS = (None, 1)


@pytest.fixture(scope="module")
def six() -> Iterator[Pool]:
    """Six ranks, for three groups and for groups of three."""
    workers = Pool(6)
    yield workers
    workers.close()


def _groups(groups: int | list[list[int]]) -> ProcessGroups:
    """Groups of a size, or explicit ones."""
    explicit = isinstance(groups, list)
    return ProcessGroups.create(Topology.of_groups(groups) if explicit else Topology(dist.get_world_size(), groups))


def addend(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a rank contributes: small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 4, (length,), generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(0)).to(dtype)
    return numbers.to(dtype)


def _same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual.view(-1).view(torch.uint8), expected.view(torch.uint8))


def wrong_results(group_size: int | list[list[int]], device: str = "cpu") -> list[str]:
    groups, wrong = _groups(group_size), []
    n, rank = groups.topology.world_size, groups.rank

    def compare(what: str, actual: Tensor, expected: Tensor) -> None:
        if not _same(actual, expected):
            wrong.append(f"{what} {actual.dtype} of {actual.numel()}: {actual.tolist()} instead of {expected.tolist()}")

    for algorithm, chunk in [*(("two-level", chunk) for chunk in CHUNKS), ("flat", None)]:
        options = {"algorithm": algorithm, "chunk_bytes": chunk}
        for dtype in MOVED:
            for length in LENGTHS:
                addends = [addend(r, length, dtype).to(device) for r in range(n)]
                out, shard = addends[0].new_zeros(n, length), addends[rank].clone()
                all_gather(out, shard, groups, **options)
                compare(f"{options} all_gather", out, torch.cat(addends))
                compare(f"{options} all_gather's shard", shard, addends[rank])
                for src in (0, n - 1):
                    tensor = addends[rank].clone()
                    broadcast(tensor, src, groups, **options)
                    compare(f"{options} broadcast from {src}", tensor, addends[src])
        for dtype in SUMMED:
            for length in LENGTHS:
                wholes = [addend(r, n * length, dtype).to(device) for r in range(n)]
                total = torch.stack(wholes).sum(0, dtype=dtype)
                out, whole = wholes[0].new_zeros(length), wholes[rank].clone()
                reduce_scatter(out, whole, groups, **options)
                compare(f"{options} reduce_scatter", out, total[rank * length : (rank + 1) * length])
                compare(f"{options} reduce_scatter's whole", whole, wholes[rank])
                addends = [addend(r, length, dtype).to(device) for r in range(n)]
                tensor = addends[rank].clone()
                all_reduce(tensor, groups, **options)
                compare(f"{options} all_reduce", tensor, torch.stack(addends).sum(0, dtype=dtype))
    return wrong[:5]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
def test_every_dtype_and_size(pool: Pool, topology: tuple[int, int]) -> None:
    assert pool.run(wrong_results, topology[1]) == [[]] * WORLD_SIZE


@pytest.mark.full
def test_every_dtype_and_size_in_explicit_groups(pool: Pool, six: Pool) -> None:
    assert pool.run(wrong_results, [[0, 2], [1, 3]]) == [[]] * WORLD_SIZE
    assert six.run(wrong_results, [[0, 1, 4], [2, 3, 5]]) == [[]] * 6


@pytest.mark.parametrize("group_size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_every_dtype_and_size_on_six_ranks(six: Pool, group_size: int) -> None:
    assert six.run(wrong_results, group_size) == [[]] * 6


def _differences_to_torch(group_size: int) -> dict[str, float]:
    """The largest difference to torch's collectives on random numbers in float64."""
    groups = _groups(group_size)
    n, rank = groups.topology.world_size, groups.rank
    generator = torch.Generator().manual_seed(rank)
    shard = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    whole = torch.randn(n, 5, 7, generator=generator, dtype=torch.float64)
    ours = [torch.empty_like(whole), torch.empty_like(shard), whole.clone(), whole.clone()]
    theirs = [torch.empty_like(whole), torch.empty_like(shard), whole.clone(), whole.clone()]
    all_gather(ours[0], shard, groups, chunk_bytes=256)
    _compat.all_gather(theirs[0].view(-1), shard.view(-1))
    reduce_scatter(ours[1], whole, groups, chunk_bytes=256)
    _compat.reduce_scatter(theirs[1].view(-1), whole.view(-1))
    all_reduce(ours[2], groups, chunk_bytes=256)
    dist.all_reduce(theirs[2])
    broadcast(ours[3], 1, groups, chunk_bytes=256)
    dist.broadcast(theirs[3], 1)
    names = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    return {name: float((a - b).abs().max()) for name, a, b in zip(names, ours, theirs, strict=True)}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
def test_they_equal_those_of_torch(pool: Pool, topology: tuple[int, int]) -> None:
    for differences in pool.run(_differences_to_torch, topology[1]):
        assert differences["all_gather"] == differences["broadcast"] == 0
        assert 0 <= differences["reduce_scatter"] <= 1e-14
        assert 0 <= differences["all_reduce"] <= 1e-14


def _bits(group_size: int, chunk_bytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Sums of floats of very different size, twice: their bits show the order of the additions."""
    groups = _groups(group_size)
    n, results = groups.topology.world_size, []
    for _ in range(2):
        generator = torch.Generator().manual_seed(groups.rank)
        whole = torch.randn(n * 100, generator=generator) * 10.0 ** torch.randint(
            -4, 4, (n * 100,), generator=generator
        )
        part = whole.new_empty(100)
        reduce_scatter(part, whole, groups, chunk_bytes=chunk_bytes)
        all_reduce(whole, groups, chunk_bytes=chunk_bytes)
        results += [part.numpy().tobytes(), whole.numpy().tobytes()]
    return tuple(results)


@pytest.mark.parametrize("group_size", [1, 2, 3, 6])
@pytest.mark.parametrize("chunk_bytes", [0, 256])
def test_sums_have_the_same_bits_on_every_run_and_rank(six: Pool, group_size: int, chunk_bytes: int) -> None:
    ranks = six.run(_bits, group_size, chunk_bytes)
    for part, whole, part_again, whole_again in ranks:
        assert part == part_again
        assert whole == whole_again == ranks[0][1]


def _in_place(group_size: int) -> bool:
    groups = _groups(group_size)
    n, rank = groups.topology.world_size, groups.rank
    right = True
    for chunk in (0, 64):
        whole = torch.zeros(n, 50)
        whole[rank] = addend(rank, 50, torch.float32)
        all_gather(whole, whole[rank], groups, chunk_bytes=chunk)
        right &= torch.equal(whole, torch.stack([addend(r, 50, torch.float32) for r in range(n)]))
        whole = addend(rank, n * 50, torch.float32).view(n, 50)
        reduce_scatter(whole[rank], whole, groups, chunk_bytes=chunk)
        total = sum(addend(r, n * 50, torch.float32) for r in range(n)).view(n, 50)
        right &= torch.equal(whole[rank], total[rank])
    return right


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_shard_may_be_the_block_of_the_whole(pool: Pool, group_size: int) -> None:
    assert pool.run(_in_place, group_size) == [True] * WORLD_SIZE


# Bytes: formulas of a tensor of D bytes in n = ng * m ranks.


def _sends_out(group_size: int | list[list[int]]) -> bool:
    return _groups(group_size).sends_out


def test_who_sends_out_of_its_group_in_a_ring_of_all_ranks(pool: Pool) -> None:
    assert pool.run(_sends_out, 2) == [False, True, False, True]
    assert pool.run(_sends_out, 4) == [False] * 4
    assert pool.run(_sends_out, [[0, 2], [1, 3]]) == [True] * 4


def _sent(group_size: int, chunk_bytes: int | None) -> dict[str, tuple[int, int, int, int, int]]:
    """By operation, bytes inside and between groups and over the world, recorded; then what the groups counted."""
    groups = _groups(group_size)
    shard, whole = torch.zeros(480), torch.zeros(480 * groups.topology.world_size)
    calls: dict[str, Any] = {
        "all_gather": lambda: all_gather(whole, shard, groups, chunk_bytes=chunk_bytes),
        "reduce_scatter": lambda: reduce_scatter(shard, whole, groups, chunk_bytes=chunk_bytes),
        "all_reduce": lambda: all_reduce(whole, groups, chunk_bytes=chunk_bytes),
        "broadcast": lambda: broadcast(whole, 1, groups, chunk_bytes=chunk_bytes),
        "flat": lambda: all_gather(whole, shard, groups, algorithm="flat"),
    }
    sent = {}
    for name, call in calls.items():
        groups.traffic.reset()
        with recording() as recorder:
            call()
        by_role = {
            role: recorder.bytes[getattr(groups, role)] for role in ("intra_gather", "intra_reduce", "inter", "world")
        }
        assert sum(by_role.values()) == sum(recorder.bytes.values()) > 0, "something went through another communicator"
        inside = by_role["intra_gather"] + by_role["intra_reduce"]
        sent[name] = (inside, by_role["inter"], by_role["world"], groups.traffic.intra, groups.traffic.inter)
    return sent


def _check_sent(ranks: list[dict[str, tuple[int, int, int, int, int]]], ng: int, m: int) -> None:
    n = ng * m
    size = 480 * n * 4
    inside, between = size * (m - 1) // m, size // m * (ng - 1) // ng
    for rank, sent in enumerate(ranks):
        for name in ("all_gather", "reduce_scatter"):
            assert sent[name] == (inside, between, 0, inside, between), name
        assert sent["all_reduce"] == (2 * inside, 2 * between, 0, 2 * inside, 2 * between)
        column = size * (ng - 1) // ng if rank % m == 1 % m else 0
        assert sent["broadcast"] == (inside, column, 0, inside, column)
        around = size * (n - 1) // n
        leaves = ng > 1 and rank % m == m - 1
        assert sent["flat"] == (0, 0, around, 0 if leaves else around, around if leaves else 0)


@pytest.mark.parametrize("chunk_bytes", [None, 4 * 480])
@pytest.mark.parametrize("topology", [(2, 2)], ids="{0[0]}x{0[1]}".format)
def test_bytes_equal_the_formula(pool: Pool, topology: tuple[int, int], chunk_bytes: int | None) -> None:
    _check_sent(pool.run(_sent, topology[1], chunk_bytes), *topology)


@pytest.mark.parametrize("chunk_bytes", [None, 4 * 480])
@pytest.mark.parametrize("topology", [(2, 3), (3, 2)], ids="{0[0]}x{0[1]}".format)
def test_bytes_on_six_ranks(six: Pool, topology: tuple[int, int], chunk_bytes: int | None) -> None:
    _check_sent(six.run(_sent, topology[1], chunk_bytes), *topology)


# In flight together.


def in_flight(group_size: int, seed: int, device: str = "cpu") -> list[str]:
    """Many operations at once, waited for in an order of each rank's own, some at once, one never."""
    groups = _groups(group_size)
    n, rank = groups.topology.world_size, groups.rank
    program, mine = random.Random(seed), random.Random(1000 * seed + rank)
    flying: list[tuple[str, Any, Tensor, Tensor]] = []
    wrong = []

    def land(name: str, task: Any, actual: Tensor, expected: Tensor) -> None:
        task.wait()
        if not torch.equal(actual, expected):
            wrong.append(name)

    for step in range(24):
        name = program.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
        length, chunk, flat = program.choice([5, 64, 333]), program.choice([0, 128]), program.random() < 0.2
        options: dict[str, Any] = {"chunk_bytes": chunk, "algorithm": "flat" if flat else "two-level", "async_op": True}
        addends = [addend(r, n * length, torch.float32, step).to(device) for r in range(n)]
        tensor, total = addends[rank].clone(), torch.stack(addends).sum(0)
        if name == "all_gather":
            actual, expected = tensor.new_zeros(n * tensor.numel()), torch.cat(addends)
            task = all_gather(actual, tensor, groups, **options)
        elif name == "reduce_scatter":
            actual, expected = tensor.new_zeros(length), total[rank * length : (rank + 1) * length]
            task = reduce_scatter(actual, tensor, groups, **options)
        elif name == "all_reduce":
            actual, expected = tensor, total
            task = all_reduce(tensor, groups, **options)
        else:
            src = program.randrange(n)
            actual, expected = tensor, addends[src]
            task = broadcast(tensor, src, groups, **options)
        flying.append((f"{step} {name} {options}", task, actual, expected))
        if step == 3:
            forgotten = flying.pop()
        while flying and mine.random() < 0.3:
            land(*flying.pop(mine.randrange(len(flying))))
        if step % 7 == 0:
            number = torch.tensor([rank], device=device)
            all_reduce(number, groups)
            if number.item() != n * (n - 1) // 2:
                wrong.append(f"{step} a blocking all_reduce")
    mine.shuffle(flying)
    for one in flying:
        land(*one)
    del forgotten  # its memory was in use until now
    return wrong


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
def test_in_flight_together_and_waited_for_in_any_order(pool: Pool, topology: tuple[int, int], seed: int) -> None:
    assert pool.run(in_flight, topology[1], seed) == [[]] * WORLD_SIZE


@pytest.mark.parametrize("group_size", [2, 3])
def test_in_flight_together_on_six_ranks(six: Pool, group_size: int) -> None:
    assert six.run(in_flight, group_size, 7) == [[]] * 6


class _Watched:
    """A ``Work`` that notes when it is waited for to the end."""

    def __init__(self, work: Any, events: list[tuple[str, str, int]], role: str, k: int) -> None:
        self._work, self._events, self._role, self._k = work, events, role, k

    def wait(self) -> None:
        self._work.wait()
        self._events.append(("done", self._role, self._k))


def _events(operation: str) -> list[tuple[str, str, int]]:
    """What is issued and what is done in five chunks, in the order of the program."""
    groups = _groups(2)
    events: list[tuple[str, str, int]] = []
    chunk = Counter()

    def watch(work: Any, role: str) -> _Watched:
        events.append(("issued", role, chunk[role]))
        chunk[role] += 1
        return _Watched(work, events, role, chunk[role] - 1)

    def leg(original: Any) -> Any:
        return lambda self, role, *args: watch(original(self, role, *args), role)

    def steps(original: Any) -> Any:
        return lambda self, role, *args: (watch(work, role) for work in original(self, role, *args))

    whole, part = torch.zeros(4 * 80), torch.zeros(80)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "reduce", "broadcast"):
            patch.setattr(Legs, name, leg(getattr(Legs, name)))
        patch.setattr(Legs, "scatter", steps(Legs.scatter))
        if operation == "all_gather":
            all_gather(whole, part, groups, chunk_bytes=16 * 4 * 2)
        elif operation == "reduce_scatter":
            reduce_scatter(part, whole, groups, chunk_bytes=16 * 4 * 2)
        elif operation == "all_reduce":
            all_reduce(whole, groups, chunk_bytes=32 * 4)
        else:
            broadcast(whole, 0, groups, chunk_bytes=64 * 4)
    return events


@pytest.mark.parametrize(
    ("operation", "roles"),
    [
        ("all_gather", ["inter", "intra_gather"]),
        ("reduce_scatter", ["intra_reduce", "inter"]),
        ("all_reduce", ["intra_reduce", "inter", "intra_gather"]),
        ("broadcast", ["inter", "intra_gather"]),
    ],
)
def test_a_chunk_is_between_groups_while_its_neighbour_is_inside(pool: Pool, operation: str, roles: list[str]) -> None:
    for rank, events in enumerate(pool.run(_events, operation)):
        at = {event: position for position, event in enumerate(events)}
        mine = roles if operation != "broadcast" or rank % 2 == 0 else roles[1:]  # the other column has but the inside
        assert len(at) == len(events) == 2 * 5 * len(mine)
        for k in range(5):
            for before, later in pairwise(mine):
                assert at["done", before, k] < at["issued", later, k]
                if k < 4:
                    assert at["issued", before, k + 1] < at["done", later, k], "chunks one after the other"
            if k + SLOTS < 5 and operation != "broadcast":
                assert at["done", mine[-1], k] < at["issued", mine[0], k + SLOTS], "staging is used twice"


# Chunk sizes by measurement.


def _tuned() -> tuple[ChunkPlan, bool, list[int]]:
    groups = _groups(2)
    try:
        plan = tune(groups, sizes=(1 << 12, 1 << 16), chunks=(0, 1 << 12))
        again = tune(groups) is plan
        groups.shared["chunks", "cpu"] = ChunkPlan({"all_reduce": {100: {0: 1.0, 64: 2.0}, 10_000: {0: 2.0, 64: 1.0}}})
        calls = []
        for length, chunk in ((32, None), (3200, None), (3200, 0), (3200, 3200)):
            groups.traffic.reset()
            all_reduce(torch.zeros(length), groups, chunk_bytes=chunk)
            calls.append(groups.traffic.calls)
        return plan, again, calls
    finally:
        del groups.shared["chunks", "cpu"]


def test_what_is_measured_is_agreed_on_and_used(pool: Pool) -> None:
    ranks = pool.run(_tuned)
    plan, again, calls = ranks[0]
    assert all(other == plan for other, _, _ in ranks), "the same on all ranks, to the bit"
    assert again, "measured once"
    assert plan.seconds.keys() == {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
    for sizes in plan.seconds.values():
        assert list(sizes) == [1 << 12, 1 << 16]
        assert all(tried.keys() == {0, 1 << 12} and min(tried.values()) > 0 for tried in sizes.values())
    assert calls == [3, 3 * 100, 3, 3 * 2]  # three legs a chunk


def _one_level_plan() -> list[ChunkPlan]:
    plans = []
    for group_size in (1, 4):
        groups = _groups(group_size)
        plans.append(tune(groups))
        del groups.shared["chunks", "cpu"]
    return plans


@pytest.mark.parametrize("arguments", [{"sizes": ()}, {"sizes": (0,)}, {"chunks": ()}, {"chunks": (-1,)}])
def test_nothing_is_tuned_by_numbers_that_make_no_sense(arguments: dict[str, tuple[int, ...]]) -> None:
    groups = ProcessGroups.create(Topology(1, 1))
    with pytest.raises(ValueError, match=rf"tune: {next(iter(arguments))}=.* must be one and more numbers of bytes"):
        tune(groups, **arguments)
    assert not groups.shared


def test_one_level_has_nothing_to_measure(pool: Pool) -> None:
    assert pool.run(_one_level_plan) == [[ChunkPlan({}), ChunkPlan({})]] * WORLD_SIZE


# Refused before anything is sent.

BAD = {
    "dtype": lambda g: all_gather(torch.zeros(8), torch.zeros(2, dtype=torch.float64), g),
    "gather size": lambda g: all_gather(torch.zeros(9), torch.zeros(2), g),
    "scatter size": lambda g: reduce_scatter(torch.zeros(2), torch.zeros(7), g),
    "strides": lambda g: all_reduce(torch.zeros(4, 4).t(), g),
    "strides of out": lambda g: all_gather(torch.zeros(2, 4).t(), torch.zeros(2), g),
    "bool": lambda g: all_reduce(torch.zeros(4, dtype=torch.bool), g),
    "int16": lambda g: reduce_scatter(torch.zeros(1, dtype=torch.int16), torch.zeros(4, dtype=torch.int16), g),
    "src": lambda g: broadcast(torch.zeros(4), 4, g),
    "negative src": lambda g: broadcast(torch.zeros(4), -1, g),
    "algorithm": lambda g: all_reduce(torch.zeros(4), g, algorithm="ring"),
    "chunk": lambda g: all_reduce(torch.zeros(4), g, chunk_bytes=-1),
    "groups": lambda g: all_reduce(torch.zeros(4), g.topology),
    "tensor": lambda g: all_reduce(4.0, g),
}  # fmt: skip
TOLD = {
    "dtype": "ValueError: all_gather: out is torch.float32 on cpu and shard is torch.float64 on cpu",
    "gather size": "ValueError: all_gather: out has 9 elements (9,); 4 ranks with 2 elements (2,) of shard each make 8",
    "scatter size": "ValueError: reduce_scatter: whole has 7 elements (7,); 4 ranks with 2 elements (2,) of out",
    "strides": "ValueError: all_reduce: tensor of shape (4, 4) has strides (1, 4) and must be contiguous",
    "strides of out": "ValueError: all_gather: out of shape (4, 2) has strides (1, 4) and must be contiguous",
    "bool": "ValueError: all_reduce: torch.bool cannot be summed; expected one of bfloat16, float16",
    "int16": "ValueError: reduce_scatter: torch.int16 cannot be summed",
    "src": "ValueError: broadcast: src=4 is not one of the ranks 0 .. 3",
    "negative src": "ValueError: broadcast: src=-1 is not one of the ranks 0 .. 3",
    "algorithm": "ValueError: all_reduce: algorithm='ring' is not known",
    "chunk": "ValueError: all_reduce: chunk_bytes=-1 must be a number of bytes",
    "groups": "TypeError: all_reduce: groups must be ProcessGroups, got Topology",
    "tensor": "TypeError: all_reduce: tensor must be a tensor, got float",
}


UNLIKE = {
    "sizes": lambda g, r: all_reduce(torch.zeros(8 if r else 9), g),
    "dtypes": lambda g, r: all_reduce(torch.zeros(8, dtype=torch.float64 if r == 3 else torch.float32), g),
    "sources": lambda g, r: broadcast(torch.zeros(8), r % 2, g),
    "chunks": lambda g, r: all_gather(torch.zeros(8), torch.zeros(2), g, chunk_bytes=4 * r),
    "algorithms": lambda g, r: all_gather(torch.zeros(8), torch.zeros(2), g, algorithm="flat" if r else "two-level"),
    "topologies": lambda g, r: all_reduce(torch.zeros(8), (g, _groups(4))[r == 0]),
    "strides on one": lambda g, r: all_reduce(torch.zeros(2, 4) if r else torch.zeros(4, 2).t(), g),
    "operations": lambda g, r: (
        all_reduce(torch.zeros(8), g) if r else reduce_scatter(torch.zeros(2), torch.zeros(8), g)
    ),
}


def _unlike_calls() -> tuple[dict[str, str], list[float]]:
    groups, rank, told = _groups(2), dist.get_rank(), {}
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for name, call in UNLIKE.items():
            try:
                call(groups, rank)
            except ValueError as error:
                told[name] = str(error)
        ones = torch.ones(3)
        all_reduce(ones, groups)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return told, ones.tolist()


def test_calls_that_differ_between_ranks_are_told_where_torch_is_asked_for_details(pool: Pool) -> None:
    ranks = pool.run(_unlike_calls)
    refusal = "all_reduce: tensor of shape (2, 4) has strides (1, 2) and must be contiguous"
    refused = [told.pop("strides on one") for told, _ in ranks]
    assert refused[0].startswith(refusal)
    assert all(said.startswith(f"this call was refused on other ranks. ranks [0]: {refusal}") for said in refused[1:])
    told, ones = ranks[0]
    assert ranks == [ranks[0]] * WORLD_SIZE
    assert ones == [4.0] * 3
    assert told.keys() == UNLIKE.keys() - {"strides on one"}
    one = "all_reduce of 9 elements of torch.float32 (algorithm='two-level', chunk_bytes="
    assert told["sizes"].startswith(f"ranks make different calls: {one}")
    assert "on ranks [0]; all_reduce of 8 elements of torch.float32" in told["sizes"]
    assert told["sizes"].endswith("dtypes and options.")
    assert "src=0" in told["sources"]
    assert "on ranks [1, 3]" in told["sources"]


def _refusals() -> tuple[dict[str, str], int]:
    groups, told = _groups(2), {}
    with recording() as recorder:
        for name, call in BAD.items():
            try:
                call(groups)
            except (TypeError, ValueError) as error:
                told[name] = f"{type(error).__name__}: {error}"
    return told, sum(recorder.bytes.values())


def test_bad_input_is_refused_in_the_same_words_on_all_ranks(pool: Pool) -> None:
    ranks = pool.run(_refusals)
    told, nbytes = ranks[0]
    assert ranks == [ranks[0]] * WORLD_SIZE
    assert nbytes == 0
    assert told.keys() == BAD.keys()
    for name, message in told.items():
        assert message.startswith(TOLD[name]), message
        assert "HINT" in message or name == "tensor"
