"""Where a rank says that it waits."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_paro import Topology
from lightning_paro.collectives import Place, ProcessGroups, Progress
from lightning_paro.collectives._lanes import Lanes


def test_who_waits_inside_another_wait_comes_back_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress()
    assert progress.waiting() == 0
    with progress.enter("outer"):
        now[0] += 5
        assert progress.waiting() == 5
        with progress.enter("inner"):
            now[0] += 2
            assert (progress.place, progress.waiting()) == (Place(2, "inner"), 2)
        now[0] += 3
        assert (progress.place, progress.waiting()) == (Place(1, "outer"), 3)
    assert progress.waiting() == 0


def test_waiting_for_what_has_begun_does_not_count() -> None:
    """One rank may read a value, and wait for it, before the others do: they go on in the same place."""
    progress = Progress()
    begun = progress.begin("update")
    for place in (Place(1, "update"), Place(1, "update")):
        with progress.enter(begun):
            assert progress.place == place
    with progress.enter("next"):
        assert progress.place == Place(2, "next")


class _Work:
    """A collective that looks where its rank is while somebody waits for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seen: tuple[str, bool] = ("", False)

    def wait(self) -> None:
        self.seen = (self._progress.place.what, self._progress.waiting() > 0)


def test_a_task_that_waited_for_another_is_still_waiting() -> None:
    groups = ProcessGroups.create(Topology(1, 1))
    lanes = Lanes(groups, torch.device("cpu"))
    update, gather = _Work(groups.progress), _Work(groups.progress)
    before = lanes.start(iter([update]), "updating")
    lanes.start(iter([before, gather]), "gathering").wait()
    assert before.is_done
    assert (update.seen, gather.seen) == (("updating", True), ("gathering", True))
