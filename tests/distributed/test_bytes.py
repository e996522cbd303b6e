"""What is sent and what is held, to the byte, counted by somebody else than the engine.

The recorder stands in front of the methods of torch's process groups, so it sees every collective of the process,
whoever calls it and however; the groups' members tell which leg it is. The expectations are the formulas of PaRO's
time and memory model (sections 5 and 6) on sizes worked out here from the layout's rule: parameters start at multiples
of 8 elements, a buffer divides into as many such blocks as there are ranks.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_paro.sharding import PrecisionPolicy
from tests.distributed.loops import ALL, Block, Sharded, Stack, share
from tests.distributed.pool import WORLD_SIZE, Pool

TOPOLOGIES = [(1, 4), (2, 2), (4, 1)]


class Recorder:
    """Bytes this rank sent, by the communicator they went through."""

    def __init__(self) -> None:
        self.bytes: Counter[ProcessGroup] = Counter()

    def record(self, group: ProcessGroup, name: str, tensors: list[list[Tensor]]) -> None:
        size = group.size()
        largest = max(sum(tensor.nbytes for tensor in several) for several in tensors)
        passes = 2 if name.startswith("allreduce") else 1
        self.bytes[group] += passes * largest * (size - 1) // size


_WORDS = ("gather", "scatter", "reduce", "broadcast", "alltoall", "all_to_all")
_COLLECTIVES = [name for name in vars(ProcessGroup) if any(word in name for word in _WORDS)]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Every collective method of ``ProcessGroup`` is counted inside the context."""
    recorder = Recorder()
    bound = {name: vars(ProcessGroup)[name] for name in _COLLECTIVES}
    depth = 0

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            several = [arg if isinstance(arg, list) else [arg] for arg in args]
            tensors = [arg for arg in several if arg and isinstance(arg[0], Tensor)]
            if tensors and depth == 0:
                recorder.record(group, name, tensors)
            depth += 1
            try:
                return original(group, *args, **kwargs)
            finally:
                depth -= 1

        return method

    for name in bound:
        setattr(ProcessGroup, name, counted(name, getattr(ProcessGroup, name)))
    try:
        yield recorder
    finally:
        for name, method in bound.items():
            setattr(ProcessGroup, name, method)


def uneven_model() -> Stack:
    """A whole unit frozen, a unit frozen in part, sizes that divide by nothing."""
    model = Stack(*(Block(8, inner) for inner in (17, 5, 11, 40)))
    model.blocks[1].requires_grad_(False)
    model.blocks[2].a.requires_grad_(False)
    return model


def _padded(parameters: list[nn.Parameter]) -> int:
    """Elements of the flat buffer that holds these."""
    elements = sum(-(-p.numel() // 8) * 8 for p in parameters)
    return -(-elements // (8 * WORLD_SIZE)) * 8 * WORLD_SIZE if parameters else 0


def unit_sizes(model: Stack) -> list[tuple[str, int, int]]:
    """Of every unit: its name, its elements, and how many of those are trained."""
    units = {f"blocks.{i}": list(block.parameters()) for i, block in enumerate(model.blocks)}
    units["rest"] = [*model.first.parameters(), *model.last.parameters()]
    sizes = []
    for name, parameters in units.items():
        trained = _padded([p for p in parameters if p.requires_grad])
        sizes.append((name, trained + _padded([p for p in parameters if not p.requires_grad]), trained))
    return sizes


def expected_bytes(
    partition: str, topology: tuple[int, int], micro_batches: int, width: int, keeps_last: bool = True
) -> tuple[int, int]:
    """Bytes a rank sends in one step, inside its group and between groups: the formulas of section 6.

    The last block stays whole at the turn to backward once a step has shown that it is the last; the formulas do not
    know of that.
    """
    p, g, os = partition
    ng, m = topology
    intra, inter = 0, 0

    def add(elements: int, times: int, legs: str) -> None:
        nonlocal intra, inter
        whole = elements * width
        if "intra" in legs:
            intra += times * whole * (m - 1) // m
        if "inter" in legs:
            inter += times * (whole // m) * (ng - 1) // ng

    for name, all_elements, trained in unit_sizes(uneven_model()):
        s = micro_batches
        gathers = s if name == "rest" else 2 * s
        if keeps_last and name == "blocks.3":
            gathers -= s - 1
        if p != "n":  # t_param
            add(all_elements, gathers, "intra" if p == "i" else "intra inter")
        if g != "n":  # t_gradient
            add(trained, s, "intra" if g == "i" else "intra inter")
        if g == "n":  # t_sync_g
            if os == "n":
                add(trained, 2, "intra inter")
            elif os == "i":
                add(trained, 1, "intra")
                add(trained, 2, "inter")
            else:
                add(trained, 1, "intra inter")
        elif g == "i":
            add(trained, 2 if os == "i" else 1, "inter")
        if p == "n" and os != "n":  # t_sync_p
            add(trained, 1, "intra" if os == "i" else "intra inter")
        elif p == "i" and os == "g":
            add(trained, 1, "inter")
    return intra, inter


def _step(loop: Sharded, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> None:
    optimizer.zero_grad()
    for micro in range(micro_batches):
        with loop.step():
            loss = model(share(0, loop.rank, micro).float()).square().mean()
        loop.backward(loss, sync=micro == micro_batches - 1)
    optimizer.step()


def _differing_bytes(topology: tuple[int, int], micro_batches: int) -> list[str]:
    found = []
    for partition in ALL:
        model = uneven_model()
        loop = Sharded(partition, topology[1])
        loop.shard(model)
        optimizer = loop.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
        with recording() as recorder:
            _step(loop, model, optimizer, micro_batches)
        groups = loop.groups
        sent = (
            recorder.bytes[groups.intra_gather] + recorder.bytes[groups.intra_reduce],
            recorder.bytes[groups.inter],
        )
        traffic = loop.engine.traffic
        expected = expected_bytes(partition, topology, micro_batches, width=4)
        known = {groups.intra_gather, groups.intra_reduce, groups.inter, groups.control, torch.distributed.group.WORLD}
        if sent != expected:
            found.append(f"{partition}: sent {sent}, expected {expected}")
        if (traffic.intra, traffic.inter) != sent:
            found.append(f"{partition}: sent {sent}, the engine says {(traffic.intra, traffic.inter)}")
        if not set(recorder.bytes) <= known:
            found.append(f"{partition}: something went through a communicator of nobody's")
        loop.close()
    return found


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids="{0[0]}x{0[1]}".format)
def test_bytes_sent_in_a_step_equal_the_formula(pool: Pool, topology: tuple[int, int], micro_batches: int) -> None:
    for rank, wrong in enumerate(pool.run(_differing_bytes, topology, micro_batches)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


def _recorded_by_hand() -> tuple[int, int, int]:
    world = torch.distributed.group.WORLD
    with recording() as recorder:
        torch.distributed.all_reduce(torch.zeros(8))
        after_reduce = recorder.bytes[world]
        out = torch.empty(32)
        getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)(out, torch.zeros(8))
        after_gather = recorder.bytes[world]
        getattr(torch.distributed, "reduce_scatter_single", torch.distributed.reduce_scatter_tensor)(out[:8], out)
    return after_reduce, after_gather - after_reduce, recorder.bytes[world] - after_gather


def test_the_recorder_sees_collectives(pool: Pool) -> None:
    ring = 3 / 4  # of the whole, sent once by each of four ranks
    assert pool.run(_recorded_by_hand)[0] == (2 * 32 * ring, 128 * ring, 128 * ring)


def _control_bytes(partition: str) -> tuple[int, int]:
    model = uneven_model()
    loop = Sharded(partition)
    loop.shard(model)
    optimizer = loop.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    _step(loop, model, optimizer, 1)
    loop.engine.traffic.reset()
    with recording() as recorder:
        _step(loop, model, optimizer, 3)
    loop.close()
    return loop.engine.traffic.control, recorder.bytes[loop.groups.control]


def test_control_traffic_is_small_and_once_a_step(pool: Pool) -> None:
    """Eight numbers, whatever the model and the micro-batches."""
    for control, recorded in pool.run(_control_bytes, "iig"):
        assert control == 8 * 8
        assert recorded == 2 * control * 3 // 4


class Even(nn.Module):
    """Sizes without padding under four ranks: the formula holds to the byte."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.frozen = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)).requires_grad_(False)
        self.out = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        for block, frozen in zip(self.blocks, self.frozen, strict=True):
            x = torch.tanh(block(x) + frozen(x))
        return (x * self.out).mean()


def _alive() -> dict[int, int]:
    """Bytes of every storage that a live tensor shows, by address."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():  # stand-ins refuse to be looked into
        storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _wrongly_held(partition: str, topology: tuple[int, int], width: int) -> list[str]:
    """Trains a little, and compares what is alive with the formula after a step, cleared, and inside a window."""
    policy = PrecisionPolicy() if width == 4 else PrecisionPolicy(torch.bfloat16, master_weights=True)
    loop = Sharded(partition, topology[1], policy=policy)
    model = Even()
    loop.shard(model)
    optimizer = loop.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    p, g, os = (dict(zip("nig", (1, topology[1], WORLD_SIZE), strict=True))[letter] for letter in partition)
    trained = sum(q.numel() for q in model.parameters() if q.requires_grad)
    always = sum(q.numel() for q in model.parameters()) * width // p + trained * (8 if width == 4 else 12) // os
    if width != 4 and p == os != 1:
        always -= trained * width // p  # masters are cast when they are gathered
    small = 64 * len(list(model.parameters()))  # step counters and stand-ins: a few numbers a parameter
    found = []

    def backward(sync: bool) -> None:
        with loop.step():
            loss = model(torch.ones(2, 32, dtype=policy.param_dtype))
        loop.backward(loss, sync=sync)

    def compare(stage: str, gradient: int) -> None:
        expected = always + gradient
        alive, held = sum(_alive().values()), loop.engine.held_bytes()
        for _ in range(100):  # a thread of gloo may hold the tensors of its last collective for a moment longer
            if alive <= expected + small:
                break
            time.sleep(0.02)
            alive = sum(_alive().values())
        if not expected <= alive <= expected + small:
            found.append(f"{partition} {stage}: {alive} bytes alive, expected {expected}")
        if sum(held.values()) != expected or held["gradients"] != gradient:
            found.append(f"{partition} {stage}: the engine says {held}, expected {expected}, of gradients {gradient}")

    backward(sync=False)
    backward(sync=True)
    optimizer.step()
    loop.engine.settle()
    compare("after a step", 4 * trained // os)
    optimizer.zero_grad()
    compare("cleared", 0)
    backward(sync=False)
    compare("inside a window", 4 * trained // g)
    if loop.engine.model_state_bytes() != always + 4 * trained // g:
        found.append(f"{partition}: the engine's formula says {loop.engine.model_state_bytes()}")
    loop.close()
    return found


def _all_wrongly_held(topology: tuple[int, int], width: int) -> list[str]:
    gc.collect()
    gc.freeze()  # what is there by now need not be walked again and again
    try:
        return [text for partition in ALL for text in _wrongly_held(partition, topology, width)]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("topology", "width"),
    [((2, 2), 4), ((2, 2), 2), *(pytest.param(t, 4, marks=pytest.mark.full) for t in ((1, 4), (4, 1)))],
)
def test_model_state_alive_between_micro_batches_equals_the_formula(
    pool: Pool, topology: tuple[int, int], width: int
) -> None:
    for rank, wrong in enumerate(pool.run(_all_wrongly_held, topology, width)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
