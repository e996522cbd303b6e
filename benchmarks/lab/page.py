"""The generated parts of docs/performance.md, lisa.md and supar.md, and pictures, from whatever JSON is in results/.

python -m benchmarks.lab.page
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab import guideline, parts
from benchmarks.lab.cluster import ROOT
from benchmarks.lab.learning_page import LEARNING
from benchmarks.lab.lisa_page import draw_memory, draw_time, tell_memory, tell_time
from benchmarks.lab.lisa_paro_page import LISA_PARO
from benchmarks.lab.pictures import (
    draw_collectives,
    draw_guideline,
    draw_one_sided,
    draw_phases,
    draw_scaling,
    draw_table,
)  # fmt: skip
from benchmarks.lab.races import RACES, picture, tell_race
from benchmarks.lab.report import RESULTS
from benchmarks.lab.supar_page import SUPAR

__all__ = ["PAGES", "pictures", "read", "render"]

PAGE = ROOT / "docs" / "performance.md"
PICTURES = PAGE.parent / "pictures"

PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Report = dict[str, Any]
Draw = Callable[[Any, Path], None]

OTHERS: dict[str, tuple[Callable[[Report, str], Iterator[str]], Draw]] = {
    "collectives": (parts.tell_collectives, draw_collectives),
    "cpu_collectives": (parts.tell_collectives, draw_collectives),
    "scaling": (parts.tell_scaling, draw_scaling),
    "cpu_scaling": (parts.tell_scaling, draw_scaling),
    "guideline": (parts.tell_guideline, draw_guideline),
    "one_sided": (parts.tell_one_sided, draw_one_sided),
    "trace": (parts.tell_trace, draw_phases),
}
"""What else is measured: how it is told and drawn."""

LISA: dict[str, tuple[Callable[[Report, str], Iterator[str]], dict[str, Draw]]] = {
    "lisa_memory": (tell_memory, {"lisa-memory.png": draw_memory}),
    "lisa_time": (tell_time, {"lisa-time.png": draw_time}),
    **LEARNING,
    **LISA_PARO,
}
"""What is measured of LISA: how it is told, and its pictures by file name."""

PAGES = {
    PAGE: (*RACES, *OTHERS), PAGE.with_name("lisa.md"): tuple(LISA), PAGE.with_name("supar.md"): tuple(SUPAR)
}  # fmt: skip
"""The parts of each page, by the name of the script."""


def render(page: str, reports: dict[str, Report]) -> str:
    """The page with every part between markers made anew.

    Args:
        page: Its present text.
        reports: What was measured, by the name of the script.
    """

    def part(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in reports:
            return f"{begin}\nNot measured yet: there is no `benchmarks/results/{name}.json`.\n\n{end}"
        tell = tell_race if name in RACES else (OTHERS | LISA | SUPAR)[name][0]
        told = "\n".join(tell(reports[name], name)).rstrip("\n")
        return f"{begin}\n" + re.sub(r"\n{3,}", "\n\n", told) + f"\n\n{end}"

    return PART.sub(part, page)


def pictures(reports: dict[str, Report]) -> dict[str, tuple[Draw, Any]]:
    """How each picture is drawn, and from what, by file name."""
    drawn: dict[str, tuple[Draw, Any]] = {}
    for name, report in reports.items():
        if name in RACES:
            tables = [table for part in report["setups"] for table in part["tables"]]
            drawn |= {picture(name, number): (draw_table, table) for number, table in enumerate(tables, start=1)}
    for name, (_, draw) in OTHERS.items():
        if name in reports:
            drawn[f"{name}.png"] = (draw, reports[name])
    for name, (_, draws) in (LISA | SUPAR).items():
        if name in reports:
            drawn |= {file: (draw, reports[name]) for file, draw in draws.items()}
    return drawn


def read(results: Path = RESULTS) -> dict[str, Report]:
    """What was measured, by the name of the script; and what follows from several of them together."""
    paths = {name: results / f"{name}.json" for names in PAGES.values() for name in names}
    reports = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    if {"uneven", "scaling"} <= reports.keys():
        reports["guideline"] = guideline.compare(reports["uneven"], reports["scaling"])
    return reports


def main() -> None:
    reports = read()
    for page in filter(Path.exists, PAGES):
        page.write_text(render(page.read_text(encoding="utf-8"), reports), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    for name, (draw, data) in pictures(reports).items():
        draw(data, PICTURES / name)


if __name__ == "__main__":
    main()
