"""How long things live: engines after they are closed, whole values and staged gradients during a step."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.loops import Block, Sharded, Stack, adamw, share
from tests.distributed.pool import Pool


def _trained(partition: str) -> tuple[Sharded, Stack, torch.optim.Optimizer]:
    """An engine that has seen everything: steps, accumulation, evaluation, whole values, a survived exception."""
    loop = Sharded(partition)
    model = Stack()
    model.blocks[0].requires_grad_(False)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            with loop.step():
                loss = model(share(step, loop.rank, micro).float()).square().mean()
            loop.backward(loss, sync=micro == 1)
        loop.clip(optimizer, 0.1)
        optimizer.step()
        with loop.evaluation(whole=step == 0), torch.no_grad():
            model(share(5, loop.rank).float())
        with loop.full_parameters(model, writeback=True):
            pass
    with loop.step():
        x = model.blocks[0](model.first(share(6, loop.rank).float()))
        x.register_hook(_raise)
        loss = model.last(model.blocks[1](x)).mean()
    try:
        loop.backward(loss)
    except KeyError:
        loop.engine.abort()
    return loop, model, optimizer


def _raise(_: Tensor) -> None:
    raise KeyError


def _remains(partition: str, how: str) -> list[str]:
    gc.collect()
    gc.freeze()  # what is there by now need not be walked again
    loop, model, optimizer = _trained(partition)
    engine = loop.engine
    parts = [engine, *engine.units, *engine.flats, *engine.optimizers, engine.evaluation]
    remains = [(type(part).__name__, weakref.ref(part)) for part in parts]
    storages = [weakref.ref(flat.whole) for flat in engine.flats]
    if how == "close":
        engine.close()
    elif how == "abandon":
        engine.abandon()
    else:  # dropped, with the module and the optimizer
        del model, optimizer
    del loop, engine, parts
    gc.collect()
    gc.unfreeze()
    found = [f"a {name} is alive" for name, reference in remains if reference() is not None]
    found += ["a buffer of whole values is alive" for storage in storages if how != "abandon" and not _dies(storage)]
    if how == "close":
        for name, parameter in model.named_parameters():
            plain = type(parameter) is nn.Parameter and parameter.dtype is torch.float32 and parameter.grad is None
            frozen = name.startswith("blocks.0.")
            if not (plain and parameter.is_contiguous() and parameter.requires_grad != frozen):
                found.append(f"{name} is {parameter!r:.80}")
            if parameter._post_accumulate_grad_hooks or parameter._backward_hooks:
                found.append(f"{name} still has hooks")
        for name, module in model.named_modules():
            if module._forward_hooks or module._forward_pre_hooks or module._state_dict_pre_hooks:
                found.append(f"module '{name}' still has hooks")
        model(share(0, 0).float()).mean().backward()  # an ordinary module
        if model.last.weight.grad is None or not torch.isfinite(model.last.weight.grad).all():
            found.append("an ordinary backward gives no gradient")
    return found


def _dies(reference: weakref.ref[Tensor]) -> bool:
    """A thread of gloo may hold the tensors of its last collective for a moment longer."""
    for _ in range(200):
        if reference() is None:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("how", "partition"),
    [
        pytest.param(how, partition, marks=() if how == "close" or partition == "iig" else pytest.mark.full)
        for how in ("close", "abandon", "drop")
        for partition in ("nnn", "iig", "ggg")
    ],
)
def test_nothing_of_an_engine_survives_it(pool: Pool, how: str, partition: str) -> None:
    for rank, found in enumerate(pool.run(_remains, partition, how)):
        assert not found, f"rank {rank}: {found[:5]}"


def _sharded_again() -> bool:
    torch.manual_seed(0)
    model = Stack()
    expected = [p.detach().clone() for p in model.parameters()]
    for partition in ("iig", "nnn", "ggg"):
        loop = Sharded(partition)
        loop.shard(model)
        loop.close()
    return all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_module_can_be_sharded_again_after_close(pool: Pool) -> None:
    assert all(pool.run(_sharded_again))


class Attending(Block):
    """Reads a memory that requires a gradient, as the blocks of a decoder do."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + memory)


class Decoder(Stack):
    def __init__(self, watch: Watch) -> None:
        super().__init__(*(Attending() for _ in range(4)))
        self.watch = watch

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        x = memory.tanh()
        for block in self.blocks:
            x = block(x, memory)
            self.watch.look(x)
        return self.last(x)


class Watch:
    """Looks, between blocks in forward and in backward, at what is whole and what is staged."""

    def __init__(self) -> None:
        self.whole = self.staged = self.looks = 0
        self.loop: Sharded

    def look(self, x: Tensor) -> None:
        self._count()
        x.register_hook(lambda _: self._count())

    def _count(self) -> None:
        engine = self.loop.engine
        self.looks += 1
        self.whole = max(self.whole, sum(unit.is_whole for unit in engine.units if unit.name != "rest"))
        self.staged = max(self.staged, sum(flat.staging is not None for flat in engine.flats))


def _most_at_once(partition: str) -> tuple[int, int, int]:
    watch = Watch()
    watch.loop = loop = Sharded(partition, bucket_bytes=0)
    model = Decoder(watch)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for micro in range(2):
        with loop.step():
            loss = model(share(0, loop.rank, micro).float()).square().mean()
        loop.backward(loss, sync=micro == 1)
    optimizer.step()
    loop.close()
    return watch.whole, watch.staged, watch.looks


def test_one_block_at_a_time_is_whole_and_staged(pool: Pool, some: tuple[str, ...]) -> None:
    """Also where every block reads a memory whose own gradient is complete only after the last of them."""
    for partition in some:
        for whole, staged, looks in pool.run(_most_at_once, partition):
            assert looks == 2 * 2 * 4
            assert whole == 4 if partition[0] == "n" else whole <= 2, (partition, whole)
            assert staged <= (0 if partition[1] == "n" else 2), (partition, staged)


def _state_after_zero_grad(partition: str) -> list[int]:
    loop, _, optimizer = _trained(partition)
    sizes = []
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        sizes.append(loop.engine.held_bytes()["gradients"])
    loop.close()
    return sizes


def test_gradients_are_given_back_by_zero_grad(pool: Pool, few: tuple[str, ...]) -> None:
    for partition in few:
        assert pool.run(_state_after_zero_grad, partition) == [[0, 0]] * 4
