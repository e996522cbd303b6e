"""Ranks that do not agree say so on all ranks, before anything could hang or be mixed up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding import Engine, PrecisionPolicy
from lightning_paro.topology import Partition, Topology
from tests.distributed.loops import Block, Sharded, Stack
from tests.distributed.pool import WORLD_SIZE, Pool, WorkerError
from tests.distributed.test_bytes import recording

ODD_ONE_OUT = 2


def _build(difference: str, odd: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model and the engine's options, on the odd rank with the difference."""
    model = Stack()
    options: dict[str, Any] = {"partition": "iig", "units": "auto", "policy": PrecisionPolicy()}
    if not odd:
        return model, options
    first = model.first
    if difference == "shape":
        model.blocks[1].a.bias = nn.Parameter(torch.zeros(16))
    elif difference == "name":
        del model.blocks[1].norm.bias
        model.blocks[1].norm.shift = nn.Parameter(torch.zeros(8))
    elif difference == "dtype":
        model.last.double()
    elif difference == "requires_grad":
        first.bias.requires_grad_(False)
    elif difference == "tie":
        model.blocks[2].a.weight = model.blocks[0].a.weight
    elif difference == "order":
        model._modules = dict(reversed(model._modules.items()))
    elif difference == "buffer":
        model.register_buffer("seen", torch.zeros(3))
    elif difference == "partition":
        options["partition"] = "ggg"
    elif difference == "units":
        options["units"] = [nn.Linear]
    elif difference == "precision":
        options["policy"] = PrecisionPolicy(torch.bfloat16, True)
    return model, options


DIFFERENCES = {
    "shape": r"parameter 'blocks\.1\.a\.bias': \(17,\) float32 .* on ranks 0, 1, 3; \(16,\) .* on rank 2",
    "name": r"parameter 'blocks\.1\.norm\.bias': .* on ranks 0, 1, 3; absent on rank 2",
    "dtype": r"parameter 'last\.weight': \(1, 8\) float32 .* on ranks 0, 1, 3; \(1, 8\) float64 .* on rank 2",
    "requires_grad": r"parameter 'first\.bias': .*requires_grad=True on ranks 0, 1, 3; .*requires_grad=False on rank 2",
    "tie": r"parameter 'blocks\.2\.a\.weight': \(17, 8\).* on ranks 0, 1, 3; tied to 'blocks\.0\.a\.weight' on rank 2",
    "order": r"setting units: ",
    "buffer": r"buffer 'seen': absent on ranks 0, 1, 3; \(3,\) float32 on rank 2",
    "partition": r"setting partition: iig on ranks 0, 1, 3; ggg on rank 2",
    "units": r"setting units: .* on ranks 0, 1, 3; .* on rank 2",
    "precision": r"setting dtypes: .* on ranks 0, 1, 3; .*bfloat16.* on rank 2",
}


def _setup(difference: str) -> tuple[str, int]:
    """What the engine says, and how many bytes went through anything but the control group before."""
    groups = ProcessGroups.create(Topology(WORLD_SIZE, 2))
    model, options = _build(difference, odd=groups.rank == ODD_ONE_OUT)
    with recording() as recorder:
        try:
            Engine(model, Partition.parse(options.pop("partition")), groups, **options)
            text = "nothing was raised"
        except ValueError as error:
            text = str(error)
    return text, sum(nbytes for group, nbytes in recorder.bytes.items() if group is not groups.control)


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_disagree_all_raise_the_same_before_any_tensor_moves(pool: Pool, difference: str) -> None:
    answers = pool.run(_setup, difference)
    assert len({text for text, _ in answers}) == 1
    text = answers[0][0]
    assert re.match(r"the ranks do not agree on the model \(\d+ differences?\):\n", text), text
    assert re.search(DIFFERENCES[difference], text), text
    assert "HINT: build the same model on every rank; only values may differ, rank 0's are used." in text
    assert len(text.splitlines()) <= 8, "a long list helps nobody"
    assert [sent for _, sent in answers] == [0] * WORLD_SIZE


def _values_differ() -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    model = Stack()
    model.register_buffer("seen", torch.randn(3))
    model.register_buffer("flag", torch.tensor([torch.distributed.get_rank() == 0]))
    loop = Sharded("iig")
    loop.shard(model)
    loop.close()
    tensors = [*model.parameters(), model.seen, model.flag]
    return [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]


def test_values_may_differ_and_those_of_rank_zero_win(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Stack()
    tensors = [*model.parameters(), torch.randn(3), torch.tensor([True])]
    expected = [value for tensor in tensors for value in tensor.detach().double().flatten().tolist()]
    assert pool.run(_values_differ) == [expected] * WORLD_SIZE


def _fails_on_one_rank(rank: int) -> None:
    groups = ProcessGroups.create(Topology(WORLD_SIZE, 2))

    def choose(module: nn.Module) -> bool:
        if groups.rank == rank:
            raise KeyError("the file of this host")
        return isinstance(module, Block)

    Engine(Stack(), Partition.parse("iig"), groups, units=choose)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_in_the_setup_makes_all_fail_with_its_error(pool: Pool, rank: int) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_fails_on_one_rank, rank)
    messages = caught.value.messages()
    assert messages[rank] == "KeyError: 'the file of this host'"
    for other in set(range(WORLD_SIZE)) - {rank}:
        assert (
            f"RuntimeError: rank {rank} failed in describing the model, so this rank stops as well" in messages[other]
        )
        assert "KeyError: 'the file of this host'" in messages[other]


def _refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def _groups_of_different_sizes() -> str:
    size = 4 if torch.distributed.get_rank() == 1 else 2
    return _refused(lambda: ProcessGroups.create(Topology(WORLD_SIZE, size)))


def test_ranks_that_disagree_on_the_group_size_all_raise(pool: Pool) -> None:
    for text in pool.run(_groups_of_different_sizes):
        assert "do not agree on group_size (rank 0: 2, rank 1: 4, rank 2: 2, rank 3: 2). HINT:" in text


def _worlds_of_other_sizes() -> list[str]:
    rank = torch.distributed.get_rank()
    asked = [Topology(8, 2), Topology(1, 1), Topology(2 if rank == 1 else WORLD_SIZE, 2)]
    return [_refused(lambda topology=topology: ProcessGroups.create(topology)) for topology in asked]


def test_a_topology_of_another_world_is_refused_on_all_ranks(pool: Pool) -> None:
    ranks = pool.run(_worlds_of_other_sizes)
    assert ranks == [ranks[0]] * WORLD_SIZE
    for told, size in zip(ranks[0], ("8", "1", "2 or 4"), strict=True):
        assert told.startswith(f"the topology has {size} ranks, but the process group has 4. HINT: start as many ranks")


def test_ranks_without_a_process_group_are_told_so() -> None:
    with pytest.raises(
        ValueError, match=r"the topology has 4 ranks, but the process group has 1\. HINT: start as many"
    ):
        ProcessGroups.create(Topology(4, 2))


def _groups_twice() -> bool:
    return ProcessGroups.create(Topology(WORLD_SIZE, 2)) is ProcessGroups.create(Topology(WORLD_SIZE, 2))


def test_groups_are_created_once(pool: Pool) -> None:
    assert pool.run(_groups_twice) == [True] * WORLD_SIZE


def _one_alone(partition: str) -> None:
    loop = Sharded(partition)
    model = Stack().double()
    loop.shard(model)
    if loop.rank == 0:
        with loop.full_parameters(model):
            pass
    with loop.step():
        loss = model(torch.ones(3, 6, dtype=torch.float64)).sum()
    loop.backward(loss)


def test_what_one_rank_does_alone_ends_all_where_they_meet(pool: Pool) -> None:
    """With whole parameters (p=N) the others come as far as the boundary of their backward."""
    with pytest.raises(WorkerError) as caught:
        pool.run(_one_alone, "nig")
    pool.close()  # some ranks have sent what others never took; the next call starts anew
    for message in caught.value.messages():
        assert "the ranks do different things at the same time" in (message or "")
        assert "rank 0: entering full_parameters" in (message or "")
        assert "ranks 1, 2, 3: agreeing on the gradients of a backward" in (message or "")
        assert "on all ranks, not on rank 0 only" in (message or "")
