"""An optimizer's state, asked for between steps by the parameters that the user knows."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn

from lightning_paro.sharding import optimizer_state_dict
from lightning_paro.topology import Granularity
from tests.distributed.loops import SOME, Alone, Sharded, Stack, accumulate, adamw, assert_as_alone
from tests.distributed.pool import Pool


def _asked_by_parameter(loop: Alone) -> nn.Module:
    """Between steps the user reads, halves and forgets momentum, by the parameters the optimizer was built on."""
    model = loop.shard(Stack().double())
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    is_split = isinstance(loop, Sharded) and loop.engine.partition.os is not Granularity.N
    for step in range(4):
        accumulate(loop, model, optimizer, 1, 1)
        if step == 0 and not is_split:
            for parameter in model.parameters():
                assert parameter in optimizer.state
                assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape
                assert optimizer.state.get(parameter) is optimizer.state[parameter]
        if step == 1:
            for parameter in model.first.parameters():
                optimizer.state.pop(parameter)
            del optimizer.state[model.last.bias]
        if step == 2 and not is_split:
            optimizer.state.update({model.last.weight: {"momentum_buffer": torch.ones_like(model.last.weight)}})
        elif step == 2:
            shards = [(flat, index) for flat, index in loop.engine.optimizers[0].members()]
            for flat, index in shards:
                entry = flat.entry(index)
                if flat.slots[index].parameter is model.last.weight and entry is not None:
                    optimizer.state[entry]["momentum_buffer"].fill_(1.0)
    if isinstance(loop, Sharded):
        saved = optimizer_state_dict(loop.engine, optimizer)
        assert loop.rank > 0 or len(saved["state"]) == len(list(model.parameters()))
        assert type(copy.deepcopy(optimizer.state)) is type(optimizer.state.copy()) is defaultdict
    return model


def test_state_can_be_asked_for_by_parameter_where_it_is_whole_and_forgotten_everywhere(pool: Pool) -> None:
    assert_as_alone(pool, _asked_by_parameter, SOME)


def _asked_where_split(partition: str) -> list[str]:
    loop, model = Sharded(partition), Stack().double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    accumulate(loop, model, optimizer, 1, 1)
    state, weight = optimizer.state, model.last.bias  # one element, so most ranks have nothing of it
    ways = [
        lambda: state[weight],
        lambda: state.get(weight),
        lambda: weight in state,
        lambda: state.setdefault(weight, {}),
        lambda: state.__setitem__(weight, {}),
        lambda: state.update({weight: {}}),
    ]
    messages = []
    for way in ways:
        with pytest.raises(RuntimeError) as error:
            way()
        messages.append(str(error.value))
    loop.close()
    assert type(optimizer.state) is defaultdict
    return messages


def test_state_cannot_be_asked_for_by_parameter_where_it_is_split(pool: Pool) -> None:
    for partition in ("nni", "iig"):
        for messages in pool.run(_asked_where_split, partition):
            for message in messages:
                assert "the optimizer's state of parameter 'last.bias' lies in shards over the ranks" in message
                assert "HINT: `lightning_paro.state_access(trainer).trainable_shards()`" in message
