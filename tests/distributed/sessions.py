"""One training script, run by one process on the whole batch and by four ranks on their shares of it.

A test writes its script once, as a module-level function of a :class:`Session`, and compares::

    def script(session):
        optimizer = session.attach(torch.optim.SGD(session.module.parameters(), lr=0.1))
        session.backward(step=0)
        optimizer.step()
        return session.values()

    wrong = pool.run(differing, script, build, SETTINGS)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_paro.collectives import ProcessGroups
from lightning_paro.sharding import Engine, PrecisionPolicy
from lightning_paro.topology import Partition, Topology
from tests.distributed.comparing import Values, as_array, differences, values_of

WORLD_SIZE = 4
ROWS = 2  # of a rank


class Cell(nn.Module):
    """A matrix, a vector and a number. Padded to 32 elements, so that the shards of four ranks cut the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.bias = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)) * self.scale


class Bank(nn.Module):
    """Cells side by side, by name: as many problems as there are, for the price of one."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({name: Cell() for name in names})

    def __getitem__(self, name: str) -> nn.Module:
        return self.cells[name]


class Setting(NamedTuple):
    """How a script is run by four ranks."""

    partition: str
    group_size: int = 2

    def __str__(self) -> str:
        return f"{self.partition} {WORLD_SIZE // self.group_size}x{self.group_size}"


SPREAD = [Setting(partition) for partition in ("iig", "nig", "ggg", "nnn")]


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, WORLD_SIZE * ROWS, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x[:, :3], y


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the rows of the squared errors of all cells."""
    cells = [cell for cell in module.modules() if isinstance(cell, Cell)]
    return torch.stack([(cell(x) - y).square().sum(1).mean() for cell in cells]).sum()


class Session:
    """A module in training, by one process where ``engine`` is None."""

    def __init__(self, module: nn.Module, setting: Setting | None = None, **engine: Any) -> None:
        self.module = module
        self.engine: Engine | None = None
        self.rank = 0
        if setting is not None:
            groups = ProcessGroups.create(Topology(WORLD_SIZE, setting.group_size))
            self.rank = groups.rank
            engine = {"units": {Cell}, **engine}
            self.engine = Engine(module, Partition.parse(setting.partition), groups, **engine)

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.engine is not None:
            self.engine.attach(optimizer)
        return optimizer

    def backward(
        self,
        step: int,
        loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of,
        *,
        sync: bool = True,
        context: AbstractContextManager[Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """One micro-batch: this process's share of ``batch(step)``, forward and backward. ``context`` is of forward."""
        x, y = batch(step, dtype)
        if self.engine is None:
            with context or nullcontext():
                loss = loss_of(self.module, x, y)
            loss.backward()
            return loss.detach()
        rows = slice(self.rank * ROWS, (self.rank + 1) * ROWS)
        self.engine.step_begin()
        with context or nullcontext():
            loss = loss_of(self.module, x[rows], y[rows])
        self.engine.step_end(backward_follows=True)
        self.engine.sync_gradients = sync
        self.engine.backward_begin()
        loss.backward()
        self.engine.backward_end()
        return loss.detach()

    def full(self) -> AbstractContextManager[Any]:
        """Whole parameters inside the context."""
        return nullcontext() if self.engine is None else self.engine.full_parameters()

    def values(self) -> Values:
        """The trained values; ends the session."""
        if self.engine is not None:
            self.engine.close()
        return values_of(self.module)


Script = Callable[[Session], Mapping[str, Any]]


def start(build: Callable[[], nn.Module], setting: Setting | None = None, **engine: Any) -> Session:
    """A session on ``build()``; ranks other than 0 start from other values, which must not matter."""
    torch.manual_seed(0 if setting is None else torch.distributed.get_rank())
    policy = engine.pop("policy", None)
    return Session(build(), setting, **engine, policy=policy or PrecisionPolicy())


def differing(
    script: Script, build: Callable[[], nn.Module], settings: Collection[Setting], tolerance: float = 1e-10
) -> list[str]:
    """In the pool: the settings in which ``script`` returns something else than in one process, and where."""
    expected = _arrays(script(start(build)))
    found = []
    for setting in settings:
        wrong = differences(_arrays(script(start(build, setting))), expected, tolerance)
        found += [f"{setting}: {'; '.join(wrong)}"] if wrong else []
    return found


def _arrays(values: Mapping[str, Any]) -> Values:
    return {name: as_array(torch.as_tensor(value)) for name, value in values.items()}


def check(wrong: list[list[str]]) -> None:
    """Fail with what ``differing`` found on each rank."""
    assert not any(wrong), "\n".join(f"rank {rank}: {line}" for rank, lines in enumerate(wrong) for line in lines)
