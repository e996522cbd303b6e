"""Where a rank is, so that ranks that wait for each other in different places can say so instead of hanging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Place", "Progress"]


class Place(NamedTuple):
    """The latest collective of a rank: its sequence number and what it was for."""

    sequence: int
    what: str

    def __str__(self) -> str:
        return f"#{self.sequence} {self.what}"


class Progress:
    """Counts the collectives of this rank. Written by the thread that trains, read by one that watches."""

    def __init__(self) -> None:
        self.place = Place(0, "nothing yet")
        self._begun = 0
        self._entered: float | None = None

    def begin(self, what: str) -> Place:
        """The place of a collective that begins now, to be entered when somebody waits for it."""
        self._begun += 1
        return Place(self._begun, what)

    @contextmanager
    def enter(self, what: str | Place) -> Iterator[None]:
        """Around a collective: ``what`` says what it is for, or where it has begun. May be nested."""
        outer = self.place if self._entered is not None else None
        self.place = self.begin(what) if isinstance(what, str) else what
        self._entered = time.monotonic()
        try:
            yield
        finally:
            self._entered = None
            if outer is not None:
                self.place, self._entered = outer, time.monotonic()

    def waiting(self) -> float:
        """Seconds spent in the present collective, 0 outside of one."""
        entered = self._entered
        return 0.0 if entered is None else time.monotonic() - entered
