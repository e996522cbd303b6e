"""Granularities, partitions, topologies: closed forms, without a process group."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Any

import pytest

from lightning_paro.topology import Granularity, Partition, Topology

N, I, G = Granularity  # noqa: E741

VALID = ["nnn", "nni", "nng", "nii", "nig", "ngg", "ini", "ing", "iii", "iig", "igg", "gng", "gig", "ggg"]
TOPOLOGIES = [(1, 1), (4, 1), (4, 2), (4, 4), (12, 3), (12, 4), (32, 8)]


def test_granularities_are_ordered_from_coarse_to_fine() -> None:
    assert N < I < G
    assert [str(granularity) for granularity in Granularity] == ["n", "i", "g"]


def test_fourteen_partitions_obey_the_rule_and_thirteen_do_not() -> None:
    valid = [str(partition) for partition in Partition.valid()]
    assert sorted(valid) == sorted(VALID)
    assert sorted(valid + Partition.refused()) == sorted(map("".join, product("nig", repeat=3)))


@pytest.mark.parametrize("written", ["iig", "IIG", "paro_iig", "PARO_IIG", " iig ", Partition(I, I, G)])
def test_a_partition_is_read_from_its_name(written: str | Partition) -> None:
    assert Partition.parse(written) == Partition(I, I, G)
    assert str(Partition.parse(written)) == "iig"


@pytest.mark.parametrize("name", ["", "ig", "iigg", "abc", "paro", "ddp", "i-g"])
def test_what_is_no_partition_is_refused_with_all_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected three letters out of n, i and g.*HINT: valid names are") as caught:
        Partition.parse(name)
    assert all(valid in str(caught.value) for valid in VALID)


@pytest.mark.parametrize(
    ("name", "coarser", "nearest"),
    [
        ("gii", "os=I is coarser than max(p=G, g=I)=G", {"iii", "gig"}),
        ("ngn", "os=N is coarser than max(p=N, g=G)=G", {"nnn", "nii", "ngg"}),
        ("nin", "os=N is coarser than max(p=N, g=I)=I", {"nnn", "nii"}),
    ],
)
def test_a_partition_that_breaks_the_rule_is_told_the_rule_and_its_neighbours(
    name: str, coarser: str, nearest: set[str]
) -> None:
    with pytest.raises(ValueError, match="is not a useful partition") as caught:
        Partition.parse(name)
    message = str(caught.value)
    assert "os >= max(p, g) with N < I < G" in message
    assert coarser in message
    offered = {word.strip(".,")[5:] for word in message.split("HINT:")[1].split() if word.startswith("paro_")}
    assert offered
    assert offered <= set(VALID)
    assert nearest <= offered


@pytest.mark.parametrize("name", Partition.refused())
def test_neighbours_of_a_refused_name_are_as_near_as_can_be(name: str) -> None:
    def distance(one: str, other: str) -> int:
        return sum(abs("nig".index(a) - "nig".index(b)) for a, b in zip(one, other, strict=True))

    with pytest.raises(ValueError, match="HINT: the nearest valid names are") as caught:
        Partition.parse(name)
    offered = {word.strip(".,")[5:] for word in str(caught.value).split("HINT:")[1].split() if word.startswith("paro_")}
    nearest = min(distance(name, valid) for valid in VALID)
    assert offered == {valid for valid in VALID if distance(name, valid) == nearest}


@pytest.mark.parametrize(("n", "m"), TOPOLOGIES)
def test_ranks_groups_and_columns_of_a_topology(n: int, m: int) -> None:
    topology = Topology(n, m)
    ng = n // m
    assert topology.num_groups == ng
    for rank in range(n):
        i, j = topology.coordinates(rank)
        assert rank == i * m + j
        assert 0 <= i < ng
        assert 0 <= j < m
        assert rank in topology.intra_ranks(i)
        assert rank in topology.inter_ranks(j)
    assert sorted(sum((topology.intra_ranks(i) for i in range(ng)), [])) == list(range(n))
    assert sorted(sum((topology.inter_ranks(j) for j in range(m)), [])) == list(range(n))
    assert [topology.divisor(granularity) for granularity in Granularity] == [1, m, n]


@pytest.mark.parametrize(("n", "m"), TOPOLOGIES)
def test_shards_nest_and_tile_so_that_every_move_is_contiguous(n: int, m: int) -> None:
    topology = Topology(n, m)
    ng, numel = n // m, 24 * n
    block = numel // n

    def elements(granularity: Granularity, rank: int) -> range:
        shard = topology.shard(granularity, rank, numel)
        assert shard.step is None
        return range(shard.start, shard.stop)

    for rank in range(n):
        i, j = topology.coordinates(rank)
        assert elements(N, rank) == range(numel)
        assert elements(I, rank) == range(j * ng * block, (j + 1) * ng * block)
        assert elements(G, rank) == range((j * ng + i) * block, (j * ng + i + 1) * block)
        assert set(elements(G, rank)) <= set(elements(I, rank))
    for i in range(ng):  # the members of a group, in their order, make up the whole
        assert [e for rank in topology.intra_ranks(i) for e in elements(I, rank)] == list(range(numel))
    for j in range(m):  # the members of a column, in their order, make up their common I-shard
        column = topology.inter_ranks(j)
        assert len({elements(I, rank) for rank in column}) == 1
        assert [e for rank in column for e in elements(G, rank)] == list(elements(I, column[0]))


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[0, 3], [1, 4], [2, 5]], [[0, 1, 4], [2, 3, 5]]])
def test_explicit_groups_have_their_own_rows_and_columns(groups: list[list[int]]) -> None:
    topology = Topology.of_groups(groups)
    n, m = sum(len(group) for group in groups), len(groups[0])
    assert (topology.world_size, topology.group_size, topology.num_groups) == (n, m, len(groups))
    seen = []
    for i, group in enumerate(groups):
        assert topology.intra_ranks(i) == group
        for j, rank in enumerate(group):
            assert topology.coordinates(rank) == (i, j)
            assert topology.inter_ranks(j)[i] == rank
            seen.append(topology.shard(G, rank, 8 * n))
    assert sorted(shard.start for shard in seen) == list(range(0, 8 * n, 8))
    assert Topology(**asdict(topology)) == topology
    assert topology != Topology(n, m)


def test_explicit_groups_of_neighbours_are_the_same_topology() -> None:
    assert Topology.of_groups([[0, 1], [2, 3]]) == Topology(4, 2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups of no ranks"),
        ([0, 1, 2, 3], r"groups=\[0, 1, 2, 3\] must be lists of ranks\. HINT: for example"),
        ([[0.0, 2.0], [1.0, 3.0]], "must be lists of ranks"),
        ([[0, 1], [2]], r"groups of \[1, 2\] ranks"),
        ([[0, 1], [1, 2]], "each of the ranks 0 to 3 once"),
        ([[0, 2], [1, 7]], "each of the ranks 0 to 3 once"),
        ([[1, 0], [2, 3]], r"ranks of a group must ascend, got \[1, 0\].*HINT: list the groups"),
        ([[0, 3], [1, 2]], r"ranks of a column must ascend, got \[3, 2\].*HINT: list the groups"),
    ],
)
def test_groups_that_are_no_topology(groups: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.of_groups(groups)


def test_a_buffer_that_does_not_divide_has_no_shards() -> None:
    with pytest.raises(ValueError, match="a buffer of 10 elements does not divide into 4 blocks; pad it first"):
        Topology(4, 2).shard(G, 0, 10)


@pytest.mark.parametrize(
    ("n", "m", "message"),
    [
        (6, 4, r"group_size=4 does not divide world_size=6: 6 = 1 \* 4 \+ 2\..*choose group_size from \{1, 2, 3, 6\}"),
        (4, 8, r"group_size=8 does not divide world_size=4: 4 = 0 \* 8 \+ 4\..*from \{1, 2, 4\}"),
        (4, 0, r"group_size=0 does not divide world_size=4: 0 < 1\.."),
        (4, -2, r"group_size=-2 does not divide world_size=4: -2 < 1\.."),
        (0, 1, r"world_size must be at least 1, got 0\. HINT: pass the number of ranks"),
    ],
)
def test_a_group_size_that_does_not_divide_shows_the_arithmetic(n: int, m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(n, m)


@pytest.mark.parametrize(
    ("n", "m", "runs_as"),
    [
        (8, 4, {name: name for name in VALID}),
        (4, 4, {"iig": "iii", "nig": "nii", "ggg": "iii", "nng": "nni", "nnn": "nnn", "gng": "ini"}),
        (4, 1, {"iig": "nng", "nig": "nng", "ggg": "ggg", "iii": "nnn", "nni": "nnn", "igg": "ngg"}),
        (1, 1, dict.fromkeys(VALID, "nnn")),
    ],
)
def test_empty_rungs_fall_on_their_neighbour(n: int, m: int, runs_as: dict[str, str]) -> None:
    topology = Topology(n, m)
    for name, effective in runs_as.items():
        assert str(topology.effective(Partition.parse(name))) == effective
        line = topology.explain(Partition.parse(name))
        assert (line is None) == (name == effective)


@pytest.mark.parametrize(("n", "m"), TOPOLOGIES)
@pytest.mark.parametrize("name", VALID)
def test_the_partition_that_runs_splits_everything_as_finely_as_the_one_asked_for(name: str, n: int, m: int) -> None:
    topology, asked = Topology(n, m), Partition.parse(name)
    runs = topology.effective(asked)
    for kind in ("p", "g", "os"):
        assert topology.divisor(getattr(runs, kind)) == topology.divisor(getattr(asked, kind))
        for rank in range(n):
            shards = [topology.shard(getattr(p, kind), rank, 8 * n) for p in (runs, asked)]
            assert shards[0] == shards[1]


def test_a_degenerate_topology_is_named_in_one_line() -> None:
    line = Topology(4, 1).explain(Partition.parse("iig"), state_bytes=30e9)
    assert line is not None
    assert "\n" not in line
    assert line.startswith("iig on 4 groups x 1 rank: I equals N, runs as nng, ")
    assert "30 GB of model state a rank" in line
    assert line.endswith("; for sharding use paro_ggg or a larger group_size")

    line = Topology(4, 4).explain(Partition.parse("igg"))
    assert line == "igg on 1 group x 4 ranks: G equals I, runs as iii"
    assert Topology(1, 1).explain(Partition.parse("ggg")) == "ggg on 1 group x 1 rank: there is one rank, runs as nnn"
    assert Topology(4, 2).explain(Partition.parse("ggg")) is None
