"""Graphs and backwards of every shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.loops import Alone, Block, Stack, accumulate, adamw, assert_as_alone, failing, share
from tests.distributed.pool import Pool, WorkerError


def _simple(loop: Alone, model: nn.Module, steps: int = 2, micro_batches: int = 1) -> nn.Module:
    """The plain loop: accumulation, clipping, AdamW."""
    loop.shard(model.double())
    optimizer = loop.attach(adamw(model))
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            with loop.step():
                mean = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean() / micro_batches)
            loop.backward(mean, sync=micro == micro_batches - 1)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0]):
            x = block(x)
        return self.last(x)


def _module_called_several_times(loop: Alone) -> nn.Module:
    return _simple(loop, Twice(), micro_batches=2)


def _first_unit_sees_an_input_without_gradient(loop: Alone) -> nn.Module:
    return _simple(loop, nn.Sequential(*(Block(6) for _ in range(3))), micro_batches=2)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.b(torch.tanh(self.a(x.clone())))
        return x


def _input_changed_in_place(loop: Alone) -> nn.Module:
    return _simple(loop, Stack(InPlace(), InPlace(), InPlace()))


def _hooks_that_come_after_ours(loop: Alone) -> nn.Module:
    """Hooks of the user's, registered when the engine is there, change gradients."""
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    accumulate(loop, model, optimizer, 2, 1)
    return model


def _a_hook_drops_a_gradient(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for parameter in (model.last.bias, model.blocks[1].a.weight):
        parameter.register_post_accumulate_grad_hook(_drop)
    accumulate(loop, model, optimizer, 2, 2)
    return model


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Normed(Block):
    """The gradient of one parameter needs the values of another."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.a)
        self.p = nn.Parameter(torch.randn(8, 8) / 3)
        self.q = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ (self.p * self.q)


def _parametrized_weights(loop: Alone) -> nn.Module:
    return _simple(loop, Stack(Normed(), Normed()), micro_batches=2)


class HalfFrozen(Block):
    """As with LoRA: the frozen weights are needed for the gradients of what comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.norm.requires_grad_(False)


def _frozen_weights_early_in_a_unit(loop: Alone) -> nn.Module:
    model = Stack(HalfFrozen(), HalfFrozen(), HalfFrozen())
    model.first.requires_grad_(False)
    return _simple(loop, model, micro_batches=2)


class Dictionary(Block):
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"x": super().forward(x["x"]), "count": x.get("count", 0) + 1, "aux": [x["x"].mean()]}


@dataclass
class Output:
    x: Tensor
    aux: Tensor | None = None


class DataclassBlock(Block):
    def forward(self, state: Output) -> Output:
        return Output(x=super().forward(state.x), aux=self.norm(state.x).mean())


class TupleBlock(Block):
    def forward(self, x: Tensor, aux: Tensor | None = None, *, scale: float = 1.0) -> tuple[Tensor, Tensor | None]:
        return super().forward(x) * scale, None if aux is None else aux + self.b.bias.sum()


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.dictionaries = nn.ModuleList(Dictionary() for _ in range(2))
        self.dataclasses = nn.ModuleList(DataclassBlock() for _ in range(2))
        self.tuples = nn.ModuleList(TupleBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": self.first(x)}
        for block in self.dictionaries:
            state = block(state)
        output = Output(state["x"] + state["aux"][0])
        for block in self.dataclasses:
            output = block(output)
        x, aux = output.x, output.aux
        for block in self.tuples:
            x, aux = block(x, aux=aux, scale=0.5)
        return x.mean(-1) + aux


def _outputs_of_every_structure(loop: Alone) -> nn.Module:
    return _simple(loop, Structured(), micro_batches=2)


class Checkpointed(Stack):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def _checkpointing_without_reentry(loop: Alone) -> nn.Module:
    return _simple(loop, Checkpointed(reentrant=False), micro_batches=2)


def _checkpointing_with_reentry(loop: Alone) -> nn.Module:
    return _simple(loop, Checkpointed(reentrant=True), micro_batches=2)


class CheckpointedTwice(Stack):
    """Each recomputation with re-entry has a backward of its own, which brings the same parameters their gradient."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def _the_same_block_twice_with_reentry(loop: Alone) -> nn.Module:
    return _simple(loop, CheckpointedTwice())


def test_a_block_recomputed_twice_with_reentry_needs_partitioned_parameters(pool: Pool) -> None:
    """As in DDP, whose error is of the same kind: with whole parameters its gradient was reduced after the first."""
    assert_as_alone(pool, _the_same_block_twice_with_reentry, ("ini", "iig", "ggg"))
    with pytest.raises(WorkerError) as caught:
        pool.run(failing, _the_same_block_twice_with_reentry, ("nig",), {})
    for message in caught.value.messages():
        assert message is not None
        assert "received a second gradient in one backward, after its unit was reduced" in message
        assert "HINT: use_reentrant=False." in message


class CheckpointedInside(Block):
    """The recomputed part lies inside the unit, and needs the unit's values in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.b(torch.tanh(self.a(self.norm(y)))), x, use_reentrant=False)


def _checkpointing_inside_a_unit(loop: Alone) -> nn.Module:
    return _simple(loop, Stack(CheckpointedInside(), CheckpointedInside()))


class CheckpointedPairs(Stack):
    """One recomputation runs over several units."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
        return self.last(self.blocks[2](x))


def _checkpointing_over_several_units(loop: Alone) -> nn.Module:
    return _simple(loop, CheckpointedPairs(), micro_batches=2)


class Penalised(Stack):
    """A gradient penalty: the backward of a backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = super().forward(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output + slope.square().sum(-1, keepdim=True)


def _gradient_of_a_gradient(loop: Alone) -> nn.Module:
    return _simple(loop, Penalised())


class Peeking(Stack):
    """Forwards without a graph inside the step, as a teacher or a baseline needs them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        output = super().forward(x)
        with torch.no_grad():
            self.blocks[0](self.first(x))
        return output - 0.5 * target


def _forward_without_graph_inside_a_step(loop: Alone) -> nn.Module:
    return _simple(loop, Peeking())


class Pooled(Block):
    """A block whose input and output are the same tensor for some calls, and that ignores its input in others."""

    def forward(self, x: Tensor, mode: int = 0) -> Tensor:
        return (super().forward(x), x, self.b.bias.expand_as(x))[mode]


class Odd(Stack):
    def __init__(self) -> None:
        super().__init__(Pooled(), Pooled(), Pooled())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.blocks[1](self.blocks[0](x), mode=1)
        return self.last(x + self.blocks[2](x, mode=2))


def _identity_and_constant_blocks(loop: Alone) -> nn.Module:
    return _simple(loop, Odd())


class Strided(Block):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.a.weight = nn.Parameter(torch.randn(8, 17).t() / 4)
        self.mix = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mix(x.reshape(-1, 2, 2, 2)).reshape(x.shape)


def _parameters_that_are_not_contiguous(loop: Alone) -> nn.Module:
    return _simple(loop, Stack(Strided(), Strided()))


PLAIN_LOOPS = [
    _module_called_several_times,
    _first_unit_sees_an_input_without_gradient,
    _input_changed_in_place,
    _hooks_that_come_after_ours,
    _a_hook_drops_a_gradient,
    _parametrized_weights,
    _frozen_weights_early_in_a_unit,
    _outputs_of_every_structure,
    _checkpointing_without_reentry,
    _checkpointing_with_reentry,
    _checkpointing_inside_a_unit,
    _checkpointing_over_several_units,
    _gradient_of_a_gradient,
    _forward_without_graph_inside_a_step,
    _identity_and_constant_blocks,
    _parameters_that_are_not_contiguous,
]


@pytest.mark.parametrize("scenario", PLAIN_LOOPS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_equals_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


def _two_forwards_one_backward(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():
            first = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
            second = loop.mean(lambda rank, s=step: model(share(s, rank, 1)).mean())
        loop.backward(first + second)
        optimizer.step()
    return model


def _two_forwards_two_backwards(loop: Alone) -> nn.Module:
    """Plain manual accumulation: every backward is a boundary, and what it brings down is added at the optimizer."""
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step(manual=True):
            first = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
            second = loop.mean(lambda rank, s=step: model.blocks[1](model.first(share(s, rank, 1))).mean())
            loop.backward(second)
            loop.backward(first)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


def _one_graph_two_backwards(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step(manual=True):
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
            loop.backward(mean, retain_graph=True)
            loop.backward(2 * mean)
            optimizer.step()
    return model


def _gradients_never_cleared(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5))
    for step in range(3):
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
    return model


def _blocked_and_unblocked_backwards_mixed(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step(manual=True):
            for micro, sync in enumerate([False, True, False, False, True, True]):
                mean = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean())
                loop.backward(mean, sync=sync)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


class Phased(Block):
    """A complex parameter beside real ones: flats of one unit that travel apart."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.phase * torch.exp(1j * x)).real


def _complex_parameters_in_every_unit(loop: Alone) -> nn.Module:
    model = loop.shard(Stack(Phased(), Phased(), Phased()).double())
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5))
    accumulate(loop, model, optimizer, steps=3, micro_batches=2)
    return model


class Interrupt(Exception):
    pass


def _raise(_: Tensor) -> NoReturn:
    raise Interrupt


def _exception_in_backward(loop: Alone) -> nn.Module:
    """Raised between two units' gradients, in the second micro-batch of a window; the caller starts the step over."""
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    seen = 0
    for step in range(3):
        for attempt in range(2):
            optimizer.zero_grad()
            try:
                for micro in range(2):
                    with loop.step():

                        def loss(rank: int, step: int = step, micro: int = micro, attempt: int = attempt) -> Tensor:
                            x = model.blocks[0](model.first(share(step, rank, micro)))
                            if step == 1 and attempt == 0 and micro == 1:
                                x.register_hook(_raise)
                            return model.last(model.blocks[2](model.blocks[1](x))).square().mean() / 2

                        mean = loop.mean(loss)
                    loop.backward(mean, sync=micro == 1)
                break
            except Interrupt:
                seen += 1
        loop.clip(optimizer, 0.5)
        optimizer.step()
    assert seen == 1
    return model


def _exception_in_forward(loop: Alone) -> nn.Module:
    model = loop.shard(Stack().double())
    optimizer = loop.attach(adamw(model))
    seen = 0
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            handle = model.blocks[1].a.register_forward_pre_hook(lambda module, args: _raise(args[0]))
            try:
                with loop.step():
                    loop.mean(lambda rank: model(share(7, rank)).mean())
            except Interrupt:
                seen += 1
            handle.remove()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
    assert seen == 1
    return model


def _exception_in_backward_without_clearing(loop: Alone) -> nn.Module:
    """What an interrupted backward brought down by then, and what it was to be added to, is gone on all ranks."""
    model = loop.shard(Stack(*(Block() for _ in range(5))).double())
    optimizer = loop.attach(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5))
    seen = 0
    for step in range(3):
        optimizer.zero_grad()
        with loop.step(manual=True):
            for micro in range(3):

                def loss(rank: int, step: int = step, micro: int = micro) -> Tensor:
                    x = model.first(share(step, rank, micro))
                    for number, block in enumerate(model.blocks):
                        x = block(x)
                        if number == 1 and step and micro == 1 and rank in (0, loop.rank):
                            x.register_hook(_raise)
                    return model.last(x).square().mean()

                try:
                    loop.backward(loop.mean(loss), sync=step == 1 or micro == 2)
                except Interrupt:
                    seen += 1
                    if type(loop) is Alone:
                        optimizer.zero_grad()
        optimizer.step()
    assert seen == 2
    return model


@pytest.mark.parametrize("bucket_bytes", [0, 10**9])
def test_an_interrupted_backward_leaves_no_gradient(pool: Pool, few: tuple[str, ...], bucket_bytes: int) -> None:
    assert_as_alone(pool, _exception_in_backward_without_clearing, few, bucket_bytes=bucket_bytes)


OWN_LOOPS = [
    _two_forwards_one_backward,
    _two_forwards_two_backwards,
    _one_graph_two_backwards,
    _gradients_never_cleared,
    _blocked_and_unblocked_backwards_mixed,
    _exception_in_forward,
    _complex_parameters_in_every_unit,
]


@pytest.mark.parametrize("scenario", OWN_LOOPS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_own_loop_equals_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


def test_training_goes_on_after_an_exception_in_backward_under_all_partitions(
    pool: Pool, some: tuple[str, ...]
) -> None:
    assert_as_alone(pool, _exception_in_backward, some)
