"""The oracle matrix: every case the engine must train as one process does, and the two selections that tests run.

A case is one value of every factor below. :func:`full` is all of them; :func:`pairwise` is a greedy selection in which
every two values of different factors meet, every partition and every topology among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding import Engine
from lightning_paro.topology import Partition, Topology
from tests.distributed.comparing import Values, differences, values_of

WORLD_SIZE = 4
STEPS = 3
CLIP = 0.1  # below the norm of every step's gradient: clipping always acts
TOLERANCE = {"float64": 1e-10, "float32": 1e-6}

FACTORS: dict[str, list] = {
    "partition": [str(partition) for partition in Partition.valid()],
    "topology": [(1, 4), (2, 2), (4, 1)],  # groups, group size
    "accumulation": [1, 3],
    "optimizer": ["adamw", "sgd"],
    "dtype": ["float64", "float32"],
    "model": ["full", "frozen unit", "partly frozen unit", "tied", "odd sizes"],
}


class Case(NamedTuple):
    partition: str
    topology: tuple[int, int]
    accumulation: int
    optimizer: str
    dtype: str
    model: str

    def __str__(self) -> str:
        groups, size = self.topology
        return f"{self.partition} {groups}x{size} s={self.accumulation} {self.optimizer} {self.dtype} '{self.model}'"

    @property
    def reference(self) -> Reference:
        return Reference(self.accumulation, self.optimizer, self.dtype, self.model)


class Reference(NamedTuple):
    """What of a case one process needs to know."""

    accumulation: int
    optimizer: str
    dtype: str
    model: str


def full() -> list[Case]:
    return [Case(*values) for values in product(*FACTORS.values())]


def pairs(case: Case) -> set[tuple]:
    """Every two (factor, value) that meet in a case."""
    return set(combinations(zip(FACTORS, case, strict=True), 2))


def pairwise() -> list[Case]:
    cases = full()
    missing = set().union(*(pairs(case) for case in cases))
    chosen: list[Case] = []

    def choose(candidates: Iterable[Case]) -> None:
        best = max(candidates, key=lambda case: len(missing & pairs(case)))
        missing.difference_update(pairs(best))
        chosen.append(best)

    for partition, topology in product(FACTORS["partition"], FACTORS["topology"]):
        choose(case for case in cases if case.partition == partition and case.topology == topology)
    while missing:
        choose(cases)
    return chosen


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, 2 * width + 1)
        self.b = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Net(nn.Module):
    """A language model in miniature: embedding, blocks, head, and two parameters smaller than a world of 4 ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = 7 if kind == "odd sizes" else 8
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(3))  # of the first three classes
        if kind == "tied":
            self.head.weight = self.embedding.weight
        elif kind == "frozen unit":
            self.blocks[0].requires_grad_(False)
        elif kind == "partly frozen unit":
            self.embedding.requires_grad_(False)
            for block in self.blocks:
                block.b.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale + nn.functional.pad(self.shift, (0, 8))


def build(reference: Reference, seed: int) -> Net:
    torch.manual_seed(seed)
    return Net(reference.model).to(getattr(torch, reference.dtype))


def optimizer_for(reference: Reference, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in module.parameters() if p.requires_grad]
    if reference.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)  # a harmless eps: at 1e-8 rounding noise becomes ±lr


def batch(step: int, micro: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets: of the whole batch, or a rank's share of it."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    both = torch.randint(0, 11, (2, 2 * WORLD_SIZE, 5), generator=generator)
    tokens, targets = both if rank is None else both[:, 2 * rank : 2 * rank + 2]
    return tokens, targets


def loss_of(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def train_alone(reference: Reference) -> Values:
    """One process on the whole batch."""
    module = build(reference, seed=0)
    optimizer = optimizer_for(reference, module)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(reference.accumulation):
            (loss_of(module, *batch(step, micro)) / reference.accumulation).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        assert norm > CLIP, "clipping does not act, so it is not tested"
        optimizer.step()
    return values_of(module)


def train_sharded(partition: str, groups: ProcessGroups, reference: Reference) -> Values:
    """This rank's part of the same training."""
    rank = groups.rank
    module = build(reference, seed=rank)  # rank 0's values must win
    engine = Engine(module, Partition.parse(partition), groups)
    optimizer = optimizer_for(reference, module)
    shards = engine.attach(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(reference.accumulation):
            engine.step_begin()
            share = batch(step, micro, rank if groups.topology.world_size > 1 else None)
            loss = loss_of(module, *share) / reference.accumulation
            engine.step_end(backward_follows=True)
            engine.sync_gradients = micro == reference.accumulation - 1
            engine.backward_begin()
            loss.backward()
            engine.backward_end()
        scale = min(1.0, CLIP / (engine.grad_norm().item() + 1e-6))
        for entry in shards.entries():
            if entry.grad is not None:
                entry.grad.mul_(scale)
        optimizer.step()
    engine.close()
    return values_of(module)


def train_ddp(reference: Reference) -> Values:
    """The same with torch's own data parallelism."""
    rank = torch.distributed.get_rank()
    module = build(reference, seed=rank)
    wrapped = DistributedDataParallel(module)
    optimizer = optimizer_for(reference, module)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(reference.accumulation):
            with nullcontext() if micro == reference.accumulation - 1 else wrapped.no_sync():
                (loss_of(wrapped, *batch(step, micro, rank)) / reference.accumulation).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
    return values_of(module)


def failing(cases: list[Case], expected: dict[Reference, Values]) -> list[str]:
    """In the pool: train every case, and name those that differ from one process."""
    found = []
    for case in cases:
        groups = ProcessGroups.create(Topology(WORLD_SIZE, case.topology[1]))
        values = train_sharded(case.partition, groups, case.reference)
        wrong = differences(values, expected[case.reference], TOLERANCE[case.dtype])
        found += [f"{case}: {'; '.join(wrong)}"] if wrong else []
    return found


def differing_from_ddp(partitions: tuple[str, ...], reference: Reference) -> Iterator[str]:
    expected = train_ddp(reference)
    groups = ProcessGroups.create(Topology(WORLD_SIZE, 2))
    for partition in partitions:
        wrong = differences(train_sharded(partition, groups, reference), expected, TOLERANCE[reference.dtype])
        if wrong:
            yield f"{partition}: {'; '.join(wrong)}"
