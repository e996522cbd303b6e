"""The memory of a rank, and how ranks share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_paro.planner import FreeMemory, _memory, free_memory, smallest_share


def test_ranks_of_one_place_share_what_is_free_and_what_they_hold() -> None:
    one, other = ("host", "gpu 0"), ("host", "gpu 1")
    assert smallest_share([FreeMemory(one, 70, 10)]) == 80
    assert smallest_share([FreeMemory(one, 70, 10), FreeMemory(other, 50, 5)]) == 55
    assert smallest_share([FreeMemory(one, 60, 10), FreeMemory(one, 58, 12), FreeMemory(other, 50, 5)]) == 40


def test_the_memory_of_a_host_is_what_its_kernel_calls_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(_memory, "MEMINFO", meminfo)
    meminfo.write_text("MemTotal:  3000 kB\nMemFree:  100 kB\nMemAvailable:  2000 kB\n")
    seen = free_memory("cpu")
    assert (seen.free, seen.own, seen.place[1]) == (2000 * 1024, 0, "cpu")
    for text in ("MemTotal:  3000 kB\n", None):
        meminfo.unlink() if text is None else meminfo.write_text(text)
        with pytest.raises(OSError, match=r"does not say how much memory .* HINT: give the bytes"):
            free_memory("cpu")
