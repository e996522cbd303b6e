"""docs/performance.md and its pictures are what the committed results say."""

from __future__ import annotations

import re

from benchmarks.lab.page import OTHERS, PAGE, PART, PICTURES, RACES, pictures, read, render
from benchmarks.lab.pictures import digest

PAGE_TEXT = PAGE.read_text(encoding="utf-8")
REPORTS = read()


def test_the_generated_parts_are_fresh() -> None:
    """If not: python -m benchmarks.lab.page."""
    assert render(PAGE_TEXT, REPORTS) == PAGE_TEXT


def test_every_script_has_its_part_and_something_was_measured() -> None:
    names = [name for _, name, _ in PART.findall(PAGE_TEXT)]
    assert sorted(names) == sorted([*RACES, *OTHERS])
    assert REPORTS.keys() <= set(names)
    assert "uneven" in REPORTS


def test_pictures_are_small_and_drawn_from_these_results() -> None:
    shown = re.findall(r"\]\(pictures/([\w-]+\.png)\)", PAGE_TEXT)
    drawn = pictures(REPORTS)
    assert sorted(shown) == sorted(drawn) == sorted(path.name for path in PICTURES.iterdir())
    for name, (_, data) in drawn.items():
        picture = (PICTURES / name).read_bytes()
        assert len(picture) < 100_000, name
        assert digest(data).encode() in picture, f"{name} is stale: python -m benchmarks.lab.page"
