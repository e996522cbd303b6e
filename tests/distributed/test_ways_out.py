"""Gradients that enter a unit by another way than the tensors its forward returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.loops import Alone, Block, Stack, accumulate, adamw, assert_as_alone, failing, share
from tests.distributed.pool import Pool, WorkerError


class WithAux(Block):
    """A mixture of experts often keeps its balance loss on the module."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(self.norm(x)))
        self.aux = self.b(hidden).square().mean()
        self.norm.seen = hidden  # on a module inside the unit
        return x.detach() + 0.0 * x  # the main path tells nothing of this block


class AuxStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        aux = [block.aux + block.norm.seen.mean() for block in self.blocks if [x := block(x)]]
        return self.last(x) + torch.stack(aux).sum()


class AuxNet(AuxStack):
    def __init__(self) -> None:
        super().__init__(*(WithAux() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Result:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Named(dict[str, Tensor]):
    pass


class Returning(Block):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return Result(out) if self.kind is Result else Named(hidden=out)


class ReturningStack(Stack):
    def __init__(self, kind: type) -> None:
        super().__init__(*(Returning(kind) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            out = block(x)
            x = out.hidden if isinstance(out, Result) else out["hidden"]
        return self.last(x)


class HandingOn(Block):
    """Returns its weight beside its output, as a codebook or an embedding for a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.gate


class HandingOnStack(Stack):
    def __init__(self) -> None:
        super().__init__(*(HandingOn() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            out, gate = block(x)
            x = out * gate
        return self.last(x)


class Transformed(Stack):
    """A forward-mode derivative through every block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            value, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
            x = value + 0.1 * tangent
        return self.last(x)


def _train(loop: Alone, model: nn.Module) -> nn.Module:
    loop.shard(model.double())
    accumulate(loop, model, loop.attach(adamw(model)), 2, 1)
    return model


def _left_on_the_module(loop: Alone) -> nn.Module:
    return _train(loop, AuxNet())


def _in_an_object(loop: Alone) -> nn.Module:
    return _train(loop, ReturningStack(Result))


def _in_a_kind_of_dict(loop: Alone) -> nn.Module:
    return _train(loop, ReturningStack(Named))


def _through_torch_func(loop: Alone) -> nn.Module:
    return _train(loop, Transformed())


def _through_full_parameters(loop: Alone) -> nn.Module:
    """A unit's parameters used from outside, inside of the context that the error about released ones names."""
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step(), loop.full_parameters(model.blocks[1]):

            def loss(rank: int, s: int = step) -> Tensor:
                x = model.first(share(s, rank))
                for block in model.blocks:
                    x = block(x)
                return functional.linear(torch.tanh(x), model.blocks[1].a.weight).square().mean()

            mean = loop.mean(loss)
        loop.backward(mean)
        optimizer.step()
    return model


def _two_backwards(loop: Alone, model: nn.Module, backwards: Any) -> nn.Module:
    loop.shard(model.double())
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        optimizer.zero_grad()
        with loop.step(manual=True):
            backwards(loop, model, step)
            optimizer.step()
    return model


def _one_after_the_other(loop: Alone, model: nn.Module, step: int) -> None:
    first = loop.mean(lambda rank: model(share(step, rank, 0)).square().mean())
    second = loop.mean(lambda rank: model(share(step, rank, 1)).mean())
    loop.backward(first)
    loop.backward(second)


def _the_same_again(loop: Alone, model: nn.Module, step: int) -> None:
    loss = loop.mean(lambda rank: model(share(step, rank)).square().mean())
    loop.backward(loss, retain_graph=True)
    loop.backward(loss)


def _penalty_last(loop: Alone, model: nn.Module, step: int) -> None:
    def penalty(rank: int) -> Tensor:
        x = share(step, rank, 0).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    first, second = loop.mean(penalty), loop.mean(lambda rank: model(share(step, rank, 1)).mean())
    loop.backward(second)
    loop.backward(first)


def _two_losses_of_handed_on_weights(loop: Alone) -> nn.Module:
    return _two_backwards(loop, HandingOnStack(), _one_after_the_other)


def _a_graph_retained_with_handed_on_weights(loop: Alone) -> nn.Module:
    return _two_backwards(loop, HandingOnStack(), _the_same_again)


def _a_penalty_after_another_backward(loop: Alone) -> nn.Module:
    return _two_backwards(loop, Stack(), _penalty_last)


@pytest.mark.parametrize(
    "scenario",
    [_two_losses_of_handed_on_weights, _a_graph_retained_with_handed_on_weights, _a_penalty_after_another_backward],
)
def test_several_backwards_of_what_units_keep_equal_one_process(
    pool: Pool, some: tuple[str, ...], scenario: Any
) -> None:
    assert_as_alone(pool, scenario, some)


@pytest.mark.parametrize(
    "scenario",
    [_left_on_the_module, _in_an_object, _in_a_kind_of_dict, _through_torch_func, _through_full_parameters],
)
def test_other_ways_out_of_a_unit_equal_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


class Hiding(WithAux):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.hidden, self.aux = [self.aux], None  # where nobody looks
        self.norm.seen = None
        return out.detach()


class HidingNet(Stack):
    def __init__(self) -> None:
        super().__init__(*(Hiding() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + sum(block.hidden[0] for block in self.blocks)


def _hidden(loop: Alone) -> nn.Module:
    return _train(loop, HidingNet())


def test_a_way_out_that_nobody_can_know_is_an_error_and_not_nan(pool: Pool) -> None:
    assert_as_alone(pool, _hidden, ("nng",))
    with pytest.raises(WorkerError) as caught:
        pool.run(failing, _hidden, ("iig",), {})
    for message in caught.value.messages():
        assert message is not None
        assert "received a gradient while unit 'blocks." in message or "storage of size 0" in message
