"""What is under way beside the computation: gathers ahead of it, new values behind it, and how much of it at a time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_paro.sharding._flat import Flat
from tests.distributed.loops import ALL, Alone, Block, Sharded, Stack, accumulate, adamw, assert_as_alone, share
from tests.distributed.pool import Pool

BLOCKS = 6
BLOCK_BYTES = 8 * (2 * 8 + 2 * (8 * 8 + 8))  # a norm and two linear layers in float64


def stack(blocks: int = BLOCKS) -> Stack:
    return Stack(*(Block(8, 8) for _ in range(blocks))).double()


def _train(loop: Sharded, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> None:
    for micro in range(micro_batches):
        with loop.step():
            loss = model(share(0, loop.rank, micro)).square().mean()
        loop.backward(loss, sync=micro == micro_batches - 1)
    optimizer.step()
    optimizer.zero_grad()


def _launches(partition: str, bucket_bytes: int) -> tuple[int, list[int]]:
    """Collectives of the second step, and the units that were whole whenever one was needed."""
    loop = Sharded(partition, bucket_bytes=bucket_bytes)
    model = stack()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    _train(loop, model, optimizer, 1)
    loop.engine.settle()
    loop.engine.traffic.reset()
    whole: list[int] = []
    units = [unit for unit in loop.engine.units if unit.name != "rest"]

    def look(*_: Any) -> None:
        whole.append(sum(unit.is_whole or unit.is_arriving for unit in units))

    for block in model.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    _train(loop, model, optimizer, 1)
    loop.engine.settle()
    calls = loop.engine.traffic.calls
    loop.close()
    return calls, whole


@pytest.mark.parametrize(("blocks_a_bucket", "gathers", "reduces"), [(1, 11, 7), (2, 6, 4), (3, 4, 3), (100, 2, 1)])
def test_neighbours_travel_together_and_two_buckets_at_most_are_whole(
    pool: Pool, blocks_a_bucket: int, gathers: int, reduces: int
) -> None:
    """Six blocks forward and backward, of which the last stays whole in between; the rest is gathered once."""
    for calls, whole in pool.run(_launches, "iig", blocks_a_bucket * BLOCK_BYTES):
        # inside a group: gathers and one of the rest, and sums; between groups: sums, and new values
        assert calls == gathers + 1 + reduces + 2 * reduces, calls
        assert max(whole) <= min(2 * blocks_a_bucket + 1, BLOCKS), whole


def _events_of_a_backward(partition: str, bucket_bytes: int, model: nn.Module | None = None) -> list[str]:
    """Units whose gradients arrive, and what is started on the way down, in their order."""
    loop = Sharded(partition, bucket_bytes=bucket_bytes)
    model = model or stack()
    loop.shard(model)
    loop.attach(adamw(model))
    events: list[str] = []
    lanes = loop.engine._ascent._ladder.lanes
    start, arrive = lanes.start, Flat.arrive

    def started(steps: Any, what: str | None, *rest: Any) -> Any:
        events.append(str(what))
        return start(steps, what, *rest)

    def arrived(flat: Flat, index: int) -> None:
        events.append(flat.unit)
        arrive(flat, index)

    with loop.step():
        loss = model(share(0, loop.rank)).square().mean()
    with mock.patch.object(lanes, "start", started), mock.patch.object(Flat, "arrive", arrived):
        loop.backward(loss)
    loop.close()
    return events


@pytest.mark.parametrize("partition", ["nig", "iig", "ggg"])
def test_a_bucket_leaves_before_the_gradients_that_have_no_room_in_it(pool: Pool, partition: str) -> None:
    """Two blocks fit: the sum of the last two starts before the first gradient of the one below them arrives."""
    for events in pool.run(_events_of_a_backward, partition, 2 * BLOCK_BYTES + BLOCK_BYTES // 2):
        for above in (5, 3):
            start = events.index(f"reducing the gradient of units 'blocks.{above}' to 'blocks.{above - 1}'")
            assert start < events.index(f"blocks.{above - 2}")


class _WithSpare(Stack):
    """The last block, a large one, has no part in the forward, so its gradient is awaited in vain."""

    def __init__(self) -> None:
        super().__init__(*(Block(8, 8) for _ in range(BLOCKS)), Block(8, 100))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x)


def _sums_with_a_spare(partition: str) -> list[str]:
    return [what for what in _events_of_a_backward(partition, 2 * BLOCK_BYTES, _WithSpare().double()) if "'" in what]


@pytest.mark.parametrize("partition", ["iig", "ggg"])
def test_what_is_awaited_in_vain_does_not_split_buckets(pool: Pool, partition: str) -> None:
    for events in pool.run(_sums_with_a_spare, partition):
        for above in (5, 3):
            assert f"reducing the gradient of units 'blocks.{above}' to 'blocks.{above - 1}'" in events, events


def _sums_left_under_way(partition: str) -> list[list[int]]:
    """After the backwards of a step, and after each of the forwards that follow them: what was not waited for yet."""
    loop = Sharded(partition, bucket_bytes=0)
    model = stack()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    found: list[list[int]] = []
    descent = loop.engine._descent

    def count(*_: Any) -> None:
        found[-1].append(len(descent._inside) + len(descent._between))

    for block in model.blocks:
        block.register_forward_hook(count)
    for micro in range(3):
        found.append([])
        with loop.step():
            loss = model(share(0, loop.rank, micro)).square().mean()
        loop.backward(loss, sync=micro == 2)
        count()
    optimizer.step()
    loop.close()
    return found


@pytest.mark.parametrize("partition", ALL)
def test_the_next_forward_starts_beside_the_last_sums_and_frees_their_memory(pool: Pool, partition: str) -> None:
    """Only sums that end inside the group, two at most, for four units of the next forward, and none at a boundary."""
    left = 2 if partition[1] == "i" else 0
    during = [left] * 3 + [0] * 3
    for found in pool.run(_sums_left_under_way, partition):
        assert found == [[0] * 6 + [left], [*during, left], [*during, 0]]


def _cleared_while_under_way(loop: Any) -> nn.Module:
    """Two optimizers share every unit; one clears its gradients right behind the backward that brings them."""
    model = loop.shard(stack(3))
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizers = [loop.attach(torch.optim.AdamW(part, lr=1e-2)) for part in (norms, others)]
    for step in range(3):
        for micro in range(3):
            with loop.step():
                loss = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean())
            loop.backward(loss, sync=micro == 2)
            if micro == 0:
                optimizers[0].zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_gradients_may_be_cleared_while_their_sums_are_under_way(pool: Pool) -> None:
    assert_as_alone(pool, _cleared_while_under_way, ALL)


def _order_of_updates(partition: str) -> list[str]:
    """What climbs after a step, in this order, where the optimizer has its parameters in another."""
    loop = Sharded(partition, bucket_bytes=0)
    model = stack(3)
    loop.shard(model)
    optimizer = loop.attach(torch.optim.SGD(list(model.parameters())[::-1], lr=0.1))
    with loop.step():
        loss = model(share(0, loop.rank, 0)).square().mean()
    loop.backward(loss)
    started: list[str] = []
    lanes = loop.engine._ascent._ladder.lanes
    start = lanes.start

    def watched(steps: Any, what: str | None, *rest: Any) -> Any:
        started.append(str(what))
        return start(steps, what, *rest)

    with mock.patch.object(lanes, "start", watched):
        optimizer.step()
    loop.engine.settle()
    loop.close()
    return started


@pytest.mark.parametrize("partition", ["nig", "iig", "ggg"])
def test_new_values_climb_in_the_order_of_the_next_forward(pool: Pool, partition: str) -> None:
    """Whatever waits for the rest, as every step does, would otherwise wait for all."""
    expected = [f"updating unit '{unit}' after a step" for unit in ("rest", *(f"blocks.{i}" for i in range(3)))]
    for started in pool.run(_order_of_updates, partition):
        assert started == expected


def _bytes_of_backwards(backwards: int, bucket_bytes: int) -> tuple[int, int]:
    """What the third step sends inside the group with several backwards in it, and what the rest is of that."""
    loop = Sharded("iig", bucket_bytes=bucket_bytes)
    model = stack()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        loop.engine.traffic.reset()
        with loop.step(manual=True):
            for micro in range(backwards):
                loop.backward(model(share(step, loop.rank, micro)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    rest = next(unit for unit in loop.engine.units if unit.name == "rest")
    sent = loop.engine.traffic.intra, rest.nbytes_whole // 2
    loop.close()
    return sent


@pytest.mark.parametrize("bucket_bytes", [0, 2 * BLOCK_BYTES, 10**9])
def test_nothing_is_gathered_ahead_of_the_end_of_a_backward(pool: Pool, bucket_bytes: int) -> None:
    """It would be let go there, and gathered once more; only the rest is gathered once in a step."""
    one, three = (pool.run(_bytes_of_backwards, backwards, bucket_bytes) for backwards in (1, 3))
    for (once, rest), (thrice, _) in zip(one, three, strict=True):
        assert thrice == 3 * once - 2 * rest


def _values_change_while_they_are_gathered(loop: Alone) -> nn.Module:
    """In one step: forwards without a graph, after which more is gathered ahead, and then new values."""
    model = loop.shard(stack(3))
    optimizer = loop.attach(adamw(model))
    for step in range(4):
        with loop.step(manual=True):
            for micro in range(2):
                optimizer.zero_grad()
                loop.backward(loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean()))
                with torch.no_grad():
                    loop.mean(lambda rank, s=step: model(share(s, rank, 2)).sum())
                optimizer.step()
            with torch.no_grad():
                loop.mean(lambda rank, s=step: model(share(s, rank, 2)).sum())
            with loop.full_parameters(model.blocks[0], writeback=True), torch.no_grad():
                model.blocks[0].a.weight.mul_(0.9)
            optimizer.zero_grad()
            loop.backward(loop.mean(lambda rank, s=step: model(share(s, rank, 3)).square().mean()))
            optimizer.step()
    return model


@pytest.mark.parametrize("bucket_bytes", [0, 10**9])
def test_what_was_gathered_before_values_change_is_not_used(
    pool: Pool, few: tuple[str, ...], bucket_bytes: int
) -> None:
    assert_as_alone(pool, _values_change_while_they_are_gathered, few, bucket_bytes=bucket_bytes)


READS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "compute": lambda parameter: parameter * 1,
    "detach": lambda parameter: parameter.detach().clone(),
    "subclass": lambda parameter: parameter.as_subclass(Tensor).detach(),
    "data": lambda parameter: parameter.data.clone(),
    "function": lambda parameter: torch.sum(parameter, 0),
    "copy": lambda parameter: copy.deepcopy(parameter).detach(),
    "pickle": lambda parameter: pickle.loads(pickle.dumps(parameter)).detach(),
    "list": lambda parameter: torch.stack([parameter, parameter]),
}


def _read_after_a_step(partition: str, name: str) -> list[str]:
    wrong = []
    for group_size in (1, 2, 4):
        loop = Sharded(partition, group_size)
        model = stack(2)
        loop.shard(model)
        optimizer = loop.attach(adamw(model))
        for _ in range(2):
            _train(loop, model, optimizer, 1)
            was = {key: READS[name](parameter).clone() for key, parameter in model.named_parameters()}
            loop.engine.settle()
            is_now = {key: READS[name](parameter) for key, parameter in model.named_parameters()}
            wrong += [key for key in was if not torch.equal(was[key], is_now[key])]
            wrong += [key for key, parameter in model.named_parameters() if type(parameter) is not nn.Parameter]
        loop.close()
    return wrong


@pytest.mark.parametrize(
    "name", [n if n in ("compute", "data", "list") else pytest.param(n, marks=pytest.mark.full) for n in READS]
)
def test_whoever_reads_a_whole_parameter_after_a_step_reads_its_new_value(pool: Pool, name: str) -> None:
    for partition in ("nii", "nng", "nni"):
        for wrong in pool.run(_read_after_a_step, partition, name):
            assert not wrong, (partition, wrong)


def _pending_in_evaluation(partition: str, group_size: int) -> list[tuple[int, int]]:
    """How many parameters of the rest wait for values after a step, and how many do in an evaluation after that."""
    found = []
    loop = Sharded(partition, group_size)
    model = stack(2)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    parameters = [*model.first.parameters(), *model.last.parameters()]
    for whole in (True, False):
        _train(loop, model, optimizer, 1)
        after = sum(type(parameter) is not nn.Parameter for parameter in parameters)
        with loop.evaluation(whole):
            found.append((after, sum(type(parameter) is not nn.Parameter for parameter in parameters)))
    loop.close()
    return found


@pytest.mark.parametrize(("partition", "group_size", "pending"), [("nng", 4, 4), ("nng", 1, 4), ("nng", 2, 0)])
def test_evaluation_begins_with_new_values(pool: Pool, partition: str, group_size: int, pending: int) -> None:
    """Compiled code and extensions read memory, and do not ask parameters for their values."""
    assert pool.run(_pending_in_evaluation, partition, group_size) == [[(pending, 0)] * 2] * 4


def _write_after_a_step(loop: Any) -> nn.Module:
    """Weight decay by hand between steps, as a callback might do."""
    model = stack(3)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        optimizer.zero_grad()
        with loop.step():
            loss = loop.mean(lambda rank, step=step: model(share(step, rank)).square().mean())
        loop.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return model


def _accumulate(loop: Any) -> nn.Module:
    model = stack(3)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    accumulate(loop, model, optimizer, steps=2, micro_batches=3)
    return model


def test_explicit_groups_train_as_one_process(pool: Pool) -> None:
    assert_as_alone(pool, _write_after_a_step, [name for name in ALL if name[0] == "n"], group_size=[[0, 2], [1, 3]])
    assert_as_alone(pool, _accumulate, ["iig", "igg", "ggg"], group_size=[[0, 2], [1, 3]])


@pytest.mark.parametrize("partition", [name for name in ALL if name[0] == "n"])
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_whoever_writes_to_a_whole_parameter_after_a_step_writes_to_its_new_value(
    pool: Pool, partition: str, group_size: int
) -> None:
    assert_as_alone(pool, _write_after_a_step, [partition], group_size=group_size)
