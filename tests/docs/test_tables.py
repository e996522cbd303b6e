"""The numbers in docs/paro.md: recomputed from the formulas of the same page, or those of a committed measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_paro import Granularity, Partition, Topology

N, I, G = Granularity  # noqa: E741
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paro.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([nig]{3}) \|[^|]*\| ([\d.]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)


def sent(partition: Partition, s: int) -> tuple[int, int]:
    """What crosses links inside and between groups in a step: climbs and descents, one move each per kind of link."""

    def moves(start: Granularity, stop: Granularity) -> tuple[int, int]:
        low, high = sorted((start, stop))
        return int(low < I <= high), int(low < G <= high)

    p, g, os = partition.p, partition.g, partition.os
    gathers, reductions, update = moves(N, p), moves(N, g), moves(os, p)
    boundary = {  # replicas have to be summed, too: an all-reduce is two moves
        (N, N): (2, 2),
        (N, I): (1, 2),
        (I, I): (0, 2),
    }.get((g, os), moves(g, os))
    inside, between = (
        2 * s * gathers[link] + s * reductions[link] + boundary[link] + update[link] for link in range(2)
    )
    return inside, between


def test_the_table_has_all_strategies() -> None:
    assert [row[0] for row in ROWS] == [str(partition) for partition in Partition.valid()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_of_the_table_follows_from_the_formulas(row: tuple[str, str, str, str]) -> None:
    partition, topology = Partition.parse(row[0]), Topology(world_size=32, group_size=8)
    w = 0 if row[0] in ("ini", "iii", "gng", "gig", "ggg") else 2  # those cast master weights
    bytes_per_parameter = zip((w, 4, 12), (partition.p, partition.g, partition.os), strict=True)
    assert float(row[1]) == round(7 * sum(size / topology.divisor(rung) for size, rung in bytes_per_parameter), 1)
    for s in (1, 3, 10):
        written = tuple(eval(re.sub(r"(\d)s", r"\1*s", cell), {"s": s}) for cell in row[2:])
        assert written == sent(partition, s)


def test_the_measured_table_is_that_of_the_committed_results() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "posed_cluster.json").read_text())
    cells = [re.split(r" *\| *", line.strip("| \n")) for line in PAGE.splitlines() if re.match(r"\| (DDP|paro_)", line)]
    written = [row for row in cells if "mixed" in row[0] or "true" in row[0]]
    assert len(written) == len(report["rows"])
    for row, result in zip(written, report["rows"], strict=True):
        assert row[0].lower().replace(", ", "/") == result["run"]
        measured = [result["losses"][-1], result["max_difference_to_ddp"], result["median_step_s"]]
        assert row[1:4] == [f"{measured[0]:.4f}", f"{measured[1]:.4f}", f"{measured[2]:.3f}"]
        assert row[4] == f"{max(result['peak_bytes']) / 1e9:.2f}"
        if result["predicted_bytes"]:
            assert row[5] == f"{result['predicted_bytes'] / 1e9:.2f}"
            assert max(result["peak_bytes"]) < 1.03 * result["predicted_bytes"]
