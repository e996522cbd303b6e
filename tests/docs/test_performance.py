"""Pages about measurements, and their pictures, are what the committed results say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.lab.page import PAGES, PART, PICTURES, pictures, read, render
from benchmarks.lab.pictures import digest

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES if page.exists()}
REPORTS = read()


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_the_generated_parts_are_fresh(page: Path) -> None:
    """If not: python -m benchmarks.lab.page."""
    assert render(TEXTS[page], REPORTS) == TEXTS[page]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_every_script_has_its_part(page: Path) -> None:
    names = [name for _, name, _ in PART.findall(TEXTS[page])]
    assert sorted(names) == sorted(PAGES[page])


def test_something_was_measured_and_is_on_a_page() -> None:
    assert "uneven" in REPORTS
    assert REPORTS.keys() <= {name for text in TEXTS.values() for _, name, _ in PART.findall(text)}


def test_pictures_are_small_and_drawn_from_these_results() -> None:
    shown = re.findall(r"\]\(pictures/([\w-]+\.png)\)", "".join(TEXTS.values()))
    drawn = pictures(REPORTS)
    assert sorted(shown) == sorted(drawn) == sorted(path.name for path in PICTURES.iterdir())
    for name, (_, data) in drawn.items():
        picture = (PICTURES / name).read_bytes()
        assert len(picture) < 100_000, name
        assert digest(data).encode() in picture, f"{name} is stale: python -m benchmarks.lab.page"
