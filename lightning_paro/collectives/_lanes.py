"""Collectives beside the computation: one lane for each communicator, and tasks that run along them.

A task is a generator of steps. It yields the name of a role to go on in the lane of that role, a ``Work`` or another
task to wait for it, and does its local arithmetic in between. On an accelerator a lane is a stream: all steps of a task
are issued when it starts, and waiting is the business of streams. On the host the first collective is issued when a
task starts, and the later ones when somebody drives it, at points of the program that are the same on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_paro.collectives._groups import ROLES, ProcessGroups

__all__ = ["Lanes", "Steps", "Task", "after"]

Steps: TypeAlias = "Iterator[str | Task | Any | None]"
"""What a task does: role names, tasks, works of torch.distributed, and None for what is done already."""


class Task:
    """Work under way; :meth:`wait` before its results are used or its inputs are freed.

    Args:
        what: What it does, for whoever waits for it in vain; None if it is part of another task.
        groups: The process groups, which know this rank's progress.
        keeps: Tensors that other lanes read or write until the task is done.
    """

    def __init__(self, what: str | None, groups: ProcessGroups, keeps: tuple[Tensor, ...] = ()) -> None:
        progress = groups.progress
        self._enter = contextlib.nullcontext if what is None else partial(progress.enter, progress.begin(what))
        self._keeps = keeps
        self._steps: Steps | None = None
        self._pending: Any = None
        self._event: torch.cuda.Event | None = None
        self._followers: list[Task] = []
        self.is_cut = False
        """Whether it was cancelled before it came to its end."""

    @property
    def is_done(self) -> bool:
        """Whether somebody has waited for it."""
        return self._steps is None and self._event is None

    def wait(self) -> None:
        """What is computed from here on comes after the task. On an accelerator the host does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
        elif self._steps is not None:
            with self._enter():
                while self._steps is not None:
                    pending, self._pending = self._pending, None
                    if pending is not None:
                        pending.wait()  # a task drives those that wait for it, perhaps this one
                    if self._pending is None:
                        self._drive()
        self._keeps = ()
        followers, self._followers = self._followers, []
        for task in followers:
            task._go_on()

    def cancel(self) -> None:
        """Issue nothing more; what has been issued is waited for, because it writes into memory."""
        self.is_cut |= self._steps is not None
        try:
            if self._event is not None:
                self.wait()
            elif self._pending is not None and not isinstance(self._pending, Task):
                self._pending.wait()
        except RuntimeError:  # whom it talked to has gone; why is told elsewhere
            self.is_cut = True
        self._steps, self._pending, self._keeps, self._followers = None, None, (), []

    def _go_on(self) -> None:
        """On the host: what it waited for is done, so issue what comes next."""
        if isinstance(self._pending, Task) and self._pending.is_done:
            self._pending = None
            with self._enter():
                self._drive()

    def _drive(self) -> None:
        """On the host: issue the next collective, or come to the end."""
        for step in self._steps or ():
            if isinstance(step, Task) and not step.is_done:
                step._followers.append(self)
            elif step is None or isinstance(step, (str, Task)):
                continue
            self._pending = step
            return
        self._steps = None
        self._keeps = ()


class Lanes:
    """The lanes of one rank.

    Args:
        groups: The process groups; a lane belongs to each role.
        device: Where tensors live.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self.groups = groups
        self.is_async = device.type != "cuda"
        """Whether collectives in a task hand out a ``Work``; on a lane of its own a blocking call blocks that lane."""
        self._device = device.index
        # a kernel of high priority does not wait until all of a long computation has found its place on the device
        self._streams = {} if self.is_async else {role: torch.cuda.Stream(device, priority=-1) for role in ROLES}

    @classmethod
    def over(cls, groups: ProcessGroups, device: torch.device) -> Lanes:
        """The lanes over these groups: whoever uses a communicator does it in the same lane."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        key = ("lanes", device)
        if key not in groups.shared:
            groups.shared[key] = cls(groups, device)
        lanes: Lanes = groups.shared[key]
        return lanes

    def start(self, steps: Steps, what: str | None, keeps: tuple[Tensor, ...] = ()) -> Task:
        """Begin a task. It sees everything that has been computed so far.

        Args:
            steps: What it does, see the module's description. What it leaves behind must be allocated before its first
                step: memory that is allocated in a lane belongs to that lane.
            what: What it is for; None if it is part of another task.
            keeps: Tensors it uses whose memory must not be used again before it is done.
        """
        task = Task(what, self.groups, keeps)
        if self.is_async:
            task._steps = steps
        with task._enter():
            if self.is_async:
                task._drive()
            else:
                task._event = self._issue(steps)
        return task

    def _issue(self, steps: Steps) -> torch.cuda.Event:
        begin = here = torch.cuda.current_stream(self._device)
        try:
            for step in steps:
                if isinstance(step, str):
                    there = self._streams[step]
                    there.wait_stream(here)
                    torch.cuda.set_stream(there)
                    here = there
                elif isinstance(step, Task):
                    if step._event is not None:
                        here.wait_event(step._event)
                elif step is not None:
                    step.wait()
        finally:
            torch.cuda.set_stream(begin)
        event: torch.cuda.Event = here.record_event()
        return event


def after(tasks: Sequence[Task], steps: Steps) -> Steps:
    """The same steps, once ``tasks`` are done; in lanes, from their first role on."""
    for step in steps:
        yield step
        if isinstance(step, str):
            yield from tasks
            tasks = ()
