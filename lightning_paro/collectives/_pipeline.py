"""Operations of several chunks and stages: while one chunk is between groups, another is inside one.

An operation is chunks, a chunk is stages, and a stage is one collective in the lane of a role, with the local
arithmetic around it. In every chunk, a stage begins when the one before it is done.

Whatever a communicator is asked to do, all its ranks must ask in one order. On the host, where stages are issued as
somebody waits, that is the order in which operations were started: none enters a lane before those ahead of it have
left that lane for good, and whoever waits for one brings those ahead of it to their end first, because other ranks may
be waiting for them. So ranks may wait in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from lightning_paro.collectives._lanes import Lanes, Steps, Task

__all__ = ["Pipeline", "Stage"]

Stage: TypeAlias = "tuple[str, Steps]"
"""A role, and what is done in its lane: one collective, and local arithmetic."""


class Pipeline:
    """Starts operations and keeps those in mind that have collectives to issue yet.

    Args:
        lanes: Where they run.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._ahead: list[_Operation] = []

    def start(self, what: str, chunks: Sequence[Sequence[Stage]], slots: int, keeps: tuple[Tensor, ...]) -> Task:
        """Start an operation. It sees everything that has been computed so far.

        Args:
            what: What it is for.
            chunks: Its chunks, all with the same roles.
            slots: A chunk begins when the one ``slots`` before it, whose staging it takes over, is done.
            keeps: All tensors it reads and writes.
        """
        self._ahead = [operation for operation in self._ahead if operation.roles]
        operation = _Operation([role for role, _ in chunks[0]], tuple(self._ahead))
        rows: list[list[Task]] = []
        with self._lanes.groups.progress.enter(what):
            for k, chunk in enumerate(chunks):
                before = rows[k - slots][-1] if k >= slots else None
                row = []
                for role, steps in chunk:
                    steps = operation.enter(role, before, steps, is_last=k == len(chunks) - 1)
                    before = self._lanes.start(steps, None)
                    row.append(before)
                rows.append(row)
        operation.task = self._lanes.start(operation.complete(rows), what, keeps)
        if operation.roles:
            self._ahead.append(operation)
        return operation.task


class _Operation:
    """One operation: the roles it has collectives to issue in, and those that were started before it."""

    def __init__(self, roles: list[str], ahead: tuple[_Operation, ...]) -> None:
        self.roles = set(roles)
        self.task: Task | None = None
        self._last = roles[-1]
        self._ahead = ahead

    def enter(self, role: str, before: Task | None, steps: Steps, is_last: bool) -> Steps:
        """A stage, in its turn."""
        yield role
        for other in self._ahead:
            if role in other.roles:
                yield other.task
        yield before
        work = next(steps, None)
        if is_last:  # the collective is issued by now
            self.roles.discard(role)
        yield work
        yield from steps

    def complete(self, rows: list[list[Task]]) -> Steps:
        """Wait for every stage in an order in which no lane runs dry: chunk k one stage behind chunk k-1."""
        yield self._last
        for other in self._ahead:
            if other.roles:
                yield other.task
        for t in range(len(rows) + len(rows[0]) - 1):
            for k in range(max(0, t - len(rows[0]) + 1), min(t + 1, len(rows))):
                yield rows[k][t - k]
