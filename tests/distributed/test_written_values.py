"""Values that somebody writes beside the optimizer, and memory that somebody else may still write to."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_paro.sharding import PrecisionPolicy
from lightning_paro.state_access._paro import PartitionedState
from tests.distributed.loops import (
    ALL,
    FEW,
    SOME,
    Alone,
    Block,
    Sharded,
    Stack,
    accumulate,
    adamw,
    assert_as_alone,
    share,
)
from tests.distributed.pool import Pool

BF16 = PrecisionPolicy(torch.bfloat16, master_weights=True)
POLICIES = {
    "fp64": PrecisionPolicy(),
    "16-mixed": PrecisionPolicy(torch.float16, master_weights=True, inter_dtype=torch.float32),
    "bf16-mixed": BF16,
    "wire": PrecisionPolicy(torch.bfloat16, True, intra_dtype=torch.float32, inter_dtype=torch.float32),
    "accumulator": PrecisionPolicy(torch.bfloat16, True, accumulator_dtype=torch.bfloat16),
}


def _stack() -> Stack:
    return Stack(Block(8, 8), Block(8, 8)).double()


def _step(loop: Sharded, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with loop.step():
        loss = model(share(0, loop.rank)).square().mean()
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)


def _dropped(partition: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the model computes before, in and after contexts whose changes are not kept."""
    loop, model = Sharded(partition), _stack()
    loop.shard(model)
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    x = share(0, 0)
    for _ in range(2):
        _step(loop, model, optimizer)
    with loop.step():
        with torch.no_grad():
            before = model(x)
        with loop.full_parameters(model):
            _spoil(model)
        loss = model(x)
        in_step = loss.detach().clone()
    loop.backward(loss.sum())
    optimizer.zero_grad()
    with loop.evaluation(True), torch.no_grad():
        with loop.full_parameters(model):
            _spoil(model)
        in_evaluation = model(x)
    with loop.step(), loop.full_parameters(model):
        _spoil(model)
    with loop.full_parameters(model, writeback=True):
        pass
    with loop.step(), torch.no_grad():
        later = model(x)
    with loop.full_parameters(model):
        values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    loop.close()
    return before, in_step, in_evaluation, later, values


@pytest.mark.parametrize("partition", SOME)
def test_what_is_written_without_writeback_is_gone_where_values_stay_whole(pool: Pool, partition: str) -> None:
    torch.manual_seed(0)
    for before, in_step, in_evaluation, later, values in pool.run(_dropped, partition):
        for value in (in_step, in_evaluation, later):
            torch.testing.assert_close(value, before, rtol=0, atol=0)
        assert values.abs().max() > 0.1


def _lost(partition: str, way: str, policy: PrecisionPolicy) -> tuple[Tensor, Tensor, Tensor]:
    """What the model computes before and after a context whose changes are lost, and what was saved in it."""
    mixed = policy.master_weights
    loop, model = Sharded(partition, policy=policy), Stack(Block(8, 8), Block(8, 8))
    loop.shard(model if mixed else model.double())
    x = share(0, 0).to(policy.param_dtype or torch.float64)
    saved = torch.empty(0)
    with loop.step(), torch.no_grad():
        before = model(x)
    with contextlib.suppress(KeyError), loop.full_parameters(model):
        if way == "by data":
            for parameter in model.parameters():
                parameter.data.mul_(0.01)
        else:
            _spoil(model)
        if way == "saved":  # as an EMA callback does
            with loop.engine.lent_to_rank_zero() as here:
                saved = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) if here else saved
        elif way == "nested":
            with loop.full_parameters(model.blocks):
                _spoil(model.blocks)
        elif way == "left":
            raise KeyError
    with loop.step(), torch.no_grad():
        after = model(x)
    loop.close()
    return before, after, saved


@pytest.mark.parametrize("policy", [PrecisionPolicy(), BF16], ids=["fp64", "bf16-mixed"])
@pytest.mark.parametrize("way", ["in place", "by data", "saved", "nested", "left"])
def test_what_is_written_without_writeback_is_lost(pool: Pool, way: str, policy: PrecisionPolicy) -> None:
    for partition in SOME:
        if way == "left" and partition[0] == "n" != partition[2]:
            continue  # no other copy is at hand, and an exception may be one rank's alone
        for rank, (before, after, saved) in enumerate(pool.run(_lost, partition, way, policy)):
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            assert saved.numel() == 0 or saved.abs().max() > 0.1
            assert saved.numel() > 0 or way != "saved" or rank > 0


def _nested_writeback(partition: str) -> tuple[str, list[float]]:
    """Writes of rank 0, a context in it that loses writes, and one with writeback where writes are lost."""
    loop, model = Sharded(partition), nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    loop.shard(model)
    with loop.full_parameters(model, writeback=True):
        _fill(model, 2.0 if loop.rank == 0 else 7.0)
        with loop.full_parameters(model[0]):
            _fill(model[0], 3.0)
        inside = [float(parameter.mean()) for parameter in model.parameters()]
    message = ""
    with loop.full_parameters(model):
        try:
            with loop.full_parameters(model[0], writeback=True):
                pass
        except RuntimeError as error:
            message = str(error)
    loop.close()
    return message, inside + [float(parameter.mean()) for parameter in model.parameters()]


def _fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_contexts_in_each_other(pool: Pool) -> None:
    for partition in ("iig", "ggg"):
        for rank, (message, values) in enumerate(pool.run(_nested_writeback, partition)):
            assert values == [2.0, 2.0 if rank == 0 else 7.0, 2.0, 2.0]
            assert "full_parameters(writeback=True) was entered inside" in message


def _held(partition: str, where: str) -> tuple[Tensor, Tensor]:
    """What the model computes where values stay whole, before and after a context with writes through data."""
    loop, model = Sharded(partition), _stack()
    loop.shard(model)
    x = share(0, 0)

    def spoiled() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before = model(x)
            with loop.full_parameters(model):
                for parameter in model.parameters():
                    parameter.data.mul_(0.01)
            return before, model(x)

    if where == "step":
        with loop.step():
            found = spoiled()
    elif where == "evaluation":
        with loop.evaluation(True):
            found = spoiled()
    else:
        with loop.full_parameters(model, writeback=True):
            found = spoiled()
    loop.close()
    return found


@pytest.mark.parametrize("where", ["step", "evaluation", "writeback"])
def test_writes_through_data_are_lost_where_values_stay_whole(pool: Pool, where: str) -> None:
    for partition in SOME:
        for before, after in pool.run(_held, partition, where):
            torch.testing.assert_close(after, before, rtol=0, atol=0)


def _rank_zero_writes(partition: str, step: bool) -> Tensor | None:
    """What is saved inside of a context in which rank 0 alone writes, with or without a step in it."""
    loop, model = Sharded(partition), nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    loop.shard(model)
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    with loop.step():
        loss = model(torch.ones(1, 8)).sum()
    loop.backward(loss)
    saved = None
    with loop.full_parameters(model, writeback=True):
        if loop.rank == 0:
            _fill(model, 2.0)
        if step:
            optimizer.step()
        with loop.engine.lent_to_rank_zero() as here:
            if here:
                saved = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    loop.close()
    return saved


@pytest.mark.parametrize("step", [False, True])
def test_rank_zero_is_believed_within_the_context_as_well(pool: Pool, step: bool) -> None:
    for partition in SOME:
        saved = pool.run(_rank_zero_writes, partition, step)[0]
        assert bool((saved == 2.0).all()), partition


def _graph_of_lost_values(partition: str) -> str:
    loop, model = Sharded(partition), _stack()
    loop.shard(model)
    with loop.step(), loop.full_parameters(model):
        _spoil(model)
        loss = model(share(0, 0)).sum()
    try:
        loop.backward(loss)
    except RuntimeError as error:
        loop.engine.abort()
        loop.close()
        return str(error)
    return ""


def test_a_graph_of_values_that_were_lost_is_void(pool: Pool) -> None:
    for partition in SOME:
        for message in pool.run(_graph_of_lost_values, partition):
            assert "modified by an inplace operation" in message, partition


def _each_others_memory(loop: Alone) -> nn.Module:
    """Parameters are given each other's memory, in one unit and in two, and their own transposed."""
    model = loop.shard(_stack())
    optimizer = loop.attach(adamw(model))
    first, second = model.blocks[0], model.blocks[1]
    for _ in range(2):
        accumulate(loop, model, optimizer, 1, 1)
        with loop.full_parameters(model, writeback=True):
            first.a.weight.data, first.b.weight.data = first.b.weight.data, first.a.weight.data
            first.norm.bias.data, second.norm.bias.data = second.norm.bias.data, first.norm.bias.data
            second.a.weight.data = second.a.weight.data.t()
    return model


def test_memory_can_be_exchanged(pool: Pool) -> None:
    assert_as_alone(pool, _each_others_memory, ALL)


def _left_by_an_error(loop: Alone) -> nn.Module:
    """An error leaves a context in which nothing was written, in a step; a graph that was made in it lives on."""
    model = loop.shard(_stack())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        with loop.step():
            with contextlib.suppress(KeyError), loop.full_parameters(model):
                losses.append(sum(parameter.square().sum() for parameter in model.parameters()))
                raise KeyError
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean()) + losses[0]
        loop.backward(mean)
        optimizer.step()
    return model


def test_an_error_costs_no_values_that_nobody_wrote(pool: Pool) -> None:
    assert_as_alone(pool, _left_by_an_error, SOME)


def _cut_off(loop: Alone) -> nn.Module:
    """Ranks stop right after a step, with its update under way, and what is left is sharded anew."""
    model = loop.shard(_stack())
    accumulate(loop, model, loop.attach(adamw(model)), 1, 1)
    if isinstance(loop, Sharded):
        loop.engine.abandon()
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_that_was_cut_off_leaves_no_mixture(pool: Pool, size: int) -> None:
    assert_as_alone(pool, _cut_off, ALL, group_size=size)


def _halved(partition: str, policy: PrecisionPolicy) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after all shards were halved between two steps that move nothing, and the whole masters at the end."""
    loop, model = Sharded(partition, policy=policy), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0 + 2**-12)
    loop.shard(model)
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    _step_on(loop, model, optimizer, policy)
    access = PartitionedState(loop.engine)
    for shard in access.trainable_shards().values():
        shard.value.mul_(0.5)
    access.update_parameters()
    with loop.step(), loop.full_parameters(model):
        seen = [parameter.detach().float().clone() for parameter in model.parameters()]
    _step_on(loop, model, optimizer, policy)
    loop.close()
    return seen, [parameter.detach() for parameter in model.parameters()]


def _step_on(loop: Sharded, model: nn.Module, optimizer: torch.optim.Optimizer, policy: PrecisionPolicy) -> None:
    with loop.step():
        loss = model(torch.ones(2, 8, dtype=policy.param_dtype)).sum()
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("partition", ALL)
def test_parameters_have_what_was_written_to_shards(pool: Pool, partition: str) -> None:
    for policy in (PrecisionPolicy(), BF16):
        half = (1 + 2**-12) / 2
        for seen, masters in pool.run(_halved, partition, policy):
            shown = torch.tensor(half, dtype=policy.param_dtype).float()
            assert all(bool((value == shown).all()) for value in seen)
            assert all(bool((value == half).all()) for value in masters)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.full((40,), 1 + 1j, dtype=torch.complex64))
        self.d = nn.Parameter(torch.full((5,), 1 / 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.z * (1 + 2j)).abs().square().sum() + (self.z * 1j).real.sum() + x.sum() * self.d.square().sum()


def _own_dtypes(loop: Alone) -> nn.Module:
    model = loop.shard(Complex())
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():
            loss = loop.mean(lambda rank, s=step: model(share(s, rank)))
        loop.backward(loss)
        optimizer.step()
    return model


@pytest.mark.parametrize("policy", POLICIES)
def test_complex_and_double_parameters_keep_their_dtype_on_every_way(pool: Pool, policy: str) -> None:
    assert_as_alone(pool, _own_dtypes, FEW, policy=POLICIES[policy])


def _interrupted_launch(partition: str) -> tuple[bool, list[Tensor]]:
    """A gather that was launched, and lost before anybody could note it."""
    loop, model = Sharded(partition), _stack()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    _step(loop, model, optimizer)
    lanes = loop.engine._ascent._ladder.lanes
    start = lanes.start
    lost: list[Any] = []

    def launched(steps: Any, what: str | None, *rest: Any) -> Any:
        lost.append(start(steps, what, *rest))
        raise KeyboardInterrupt

    with mock.patch.object(lanes, "start", launched), pytest.raises(KeyboardInterrupt), loop.step():
        model(share(0, loop.rank))
    flats = [flat for flat in loop.engine.flats if not flat.is_whole and flat.whole.untyped_storage().nbytes()]
    kept = [flat.whole for flat in flats]
    loop.engine.abort()
    is_left_alone = bool(flats) and all(flat.whole is not whole for flat, whole in zip(flats, kept, strict=True))
    lost[0].wait()
    optimizer.zero_grad()
    _step(loop, model, optimizer)
    loop.close()
    return is_left_alone, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("partition", ["iig", "ggg"])
def test_memory_of_an_interrupted_launch_is_left_alone(pool: Pool, partition: str) -> None:
    results = pool.run(_interrupted_launch, partition)
    for is_left_alone, parameters in results:
        assert is_left_alone
        for parameter, other in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(parameter, other, rtol=0, atol=0)
