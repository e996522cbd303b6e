"""Training code that is written once and run by one process, as the oracle, and by an engine on every rank.

A *scenario* is a module-level function that takes a loop, trains a model with it and returns the model::

    def scenario(loop: Alone) -> nn.Module:
        model = loop.shard(Model())
        optimizer = loop.attach(torch.optim.AdamW(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            with loop.step():
                loss = loop.mean(lambda rank: loss_of(model, data(step, rank)))
            loop.backward(loss)
            optimizer.step()
        return model

:class:`Alone` is plain torch: the mean of what every rank would compute. :class:`Sharded` computes its rank's own share
and brackets it for the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding import Engine, PrecisionPolicy
from lightning_paro.topology import Partition, Topology
from tests.distributed.comparing import Values, differences, values_of
from tests.distributed.pool import WORLD_SIZE, Pool

ALL = tuple(str(partition) for partition in Partition.valid())
SOME = ("nnn", "nig", "iii", "iig", "igg", "ggg")  # every granularity of everything
FEW = ("nnn", "iig", "ggg")  # every granularity of parameters and of gradients
P_WHOLE = tuple(name for name in ALL if name[0] == "n")
TOLERANCE = 1e-10

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
Scenario = Callable[["Alone"], nn.Module]


class Alone:
    """One process that does the work of all ranks."""

    rank = 0

    def shard(self, module: nn.Module) -> nn.Module:
        return module

    def attach(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        return optimizer

    def step(self, manual: bool = False) -> AbstractContextManager[None]:
        """Around a training step; ``manual`` if the backward is inside."""
        return nullcontext()

    def mean(self, loss: Callable[[int], Tensor]) -> Tensor:
        """The loss over all ranks, of which ``loss(rank)`` is one rank's."""
        return torch.stack([loss(rank) for rank in range(WORLD_SIZE)]).mean()

    def backward(self, loss: Tensor, sync: bool = True, **options: Any) -> None:
        loss.backward(**options)

    def norm(self, optimizer: torch.optim.Optimizer) -> float:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> None:
        scale = min(1.0, largest / (self.norm(optimizer) + 1e-6))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def evaluation(self, whole: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def ranks(self) -> Iterable[int]:
        """Whose work this process does."""
        return range(WORLD_SIZE)

    def close(self) -> None:
        pass


class Sharded(Alone):
    """One rank of an engine."""

    def __init__(self, partition: str, group_size: int | list[list[int]] = 2, **options: Any) -> None:
        explicit = isinstance(group_size, list)
        topology = Topology.of_groups(group_size) if explicit else Topology(WORLD_SIZE, group_size)
        self.groups = ProcessGroups.create(topology)
        self.rank = self.groups.rank
        self._partition = Partition.parse(partition)
        self._options = options
        self.engine: Engine

    def shard(self, module: nn.Module) -> nn.Module:
        self.engine = Engine(module, self._partition, self.groups, **self._options)
        return module

    def attach(self, optimizer: AnyOptimizer) -> AnyOptimizer:
        self.engine.attach(optimizer)
        return optimizer

    @contextmanager
    def step(self, manual: bool = False) -> Iterator[None]:
        self.engine.step_begin()
        try:
            yield
        except BaseException:
            self.engine.abort()
            raise
        self.engine.step_end(backward_follows=not manual)

    def mean(self, loss: Callable[[int], Tensor]) -> Tensor:
        return loss(self.rank)

    def backward(self, loss: Tensor, sync: bool = True, **options: Any) -> None:
        self.engine.sync_gradients = sync
        self.engine.backward_begin()
        loss.backward(**options)
        self.engine.backward_end()

    def norm(self, optimizer: torch.optim.Optimizer) -> float:
        return float(self.engine.grad_norm(optimizer))

    def clip(self, optimizer: torch.optim.Optimizer, largest: float) -> None:
        scale = min(1.0, largest / (self.norm(optimizer) + 1e-6))
        for entry in self.engine.shards_of(optimizer).entries():
            if entry.grad is not None:
                entry.grad.mul_(scale)

    @contextmanager
    def evaluation(self, whole: bool) -> Iterator[None]:
        self.engine.evaluation.begin(whole)
        yield
        self.engine.evaluation.end()

    def full_parameters(self, module: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return self.engine.full_parameters(module, writeback=writeback)

    def ranks(self) -> Iterable[int]:
        return (self.rank,)

    def close(self) -> None:
        self.engine.close()


def train(scenario: Scenario, loop: Alone) -> Values:
    torch.manual_seed(loop.rank)  # models differ by rank, and rank 0's wins
    model = scenario(loop)
    loop.close()
    return values_of(model)


def failing(scenario: Scenario, partitions: Iterable[str], expected: Values, **options: Any) -> list[str]:
    """In the pool: the partitions under which a scenario does not end where one process does."""
    found = []
    for partition in partitions:
        wrong = differences(train(scenario, Sharded(partition, **options)), expected, TOLERANCE)
        found += [f"{partition}: {'; '.join(wrong)}"] if wrong else []
    return found


def assert_as_alone(pool: Pool, scenario: Scenario, partitions: Iterable[str], **options: Any) -> None:
    expected = train(scenario, Alone())
    assert expected
    for rank, wrong in enumerate(pool.run(failing, scenario, tuple(partitions), expected, **options)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


class Block(nn.Module):
    """A residual block, one unit of :class:`Stack`."""

    def __init__(self, width: int = 8, inner: int = 17) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, inner)
        self.b = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers that belong to the rest."""

    def __init__(self, *blocks: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(blocks or [Block(width) for _ in range(3)])
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def share(step: int, rank: int, micro: int = 0) -> Tensor:
    """What a rank sees in a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, eps=1e-6)


def accumulate(loop: Alone, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int) -> None:
    """Steps on the mean of the squared outputs, with gradients of several micro-batches."""
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            with loop.step():
                loss = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean())
            loop.backward(loss, sync=micro == micro_batches - 1)
        optimizer.step()


__all__ = [
    "ALL", "FEW", "P_WHOLE", "SOME", "Alone", "Block", "PrecisionPolicy", "Sharded", "Stack", "accumulate", "adamw",
    "assert_as_alone", "failing", "share", "train",
]  # fmt: skip
