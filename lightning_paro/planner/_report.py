"""A plan to look at: a table for the terminal, JSON, CSV, and pictures."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lightning_paro.planner._plan import MARGIN, Peer, Plan, Row
from lightning_paro.planner._probe import Probe
from lightning_paro.topology import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = ["as_dict", "draw", "draw_scaling", "probe_table", "scaling_table", "table", "write_csv", "write_json"]

_COLUMNS = ("partition", "memory_bytes", "state_bytes", "comm_s", "step_s", "tps", "fits", "recommended")


def table(plan: Plan) -> Table:
    """Memory and time of every partition, the recommended one first, and of its peers."""
    topology = plan.network.topology
    result = Table(
        title=f"{topology.world_size} ranks in {topology.num_groups} groups of {topology.group_size}",
        caption=(
            f"One step of {plan.workload.accumulate} micro-batches, communication and computation overlapped. "
            f"Fits: what is needed and {MARGIN - 1:.0%} are within {plan.memory / 1e9:g} GB. "
            "TPS is log(1 / step). Peers by formula, on flat rings."
        ),
    )
    result.add_column("strategy")
    for name in ("memory, GB", "comm, s", "step, s", "TPS"):
        result.add_column(name, justify="right")
    result.add_column("fits")
    result.add_column("", no_wrap=True)
    for row in plan.rows:
        chosen = row is plan.recommended
        name = f"paro_{row.partition}" + ("" if row.runs_as == row.partition else f" = {row.runs_as}")
        note = "recommended" if chosen else ""
        result.add_row(name, *_numbers(row), note, style="bold" if chosen else None if row.fits else "dim")
    result.add_section()
    for peer in plan.peers:
        result.add_row(peer.name, *_numbers(peer), "", style=None if peer.fits else "dim")
    return result


def scaling_table(plans: Sequence[Plan]) -> Table:
    """Seconds a step of every partition, by number of ranks."""
    result = Table(
        title="seconds a step, by number of ranks",
        caption="The same work for each rank. *: does not fit. >: recommended.",
    )
    result.add_column("paro_")
    for plan in plans:
        result.add_column(str(plan.network.topology.world_size), justify="right")
    for partition in Partition.valid():
        cells = []
        for plan in plans:
            row = next(row for row in plan.rows if row.partition == partition)
            text = _seconds(row.cost.step_s) + "*" * (not row.fits)
            cells.append(f"[bold]>{text}[/]" if row is plan.recommended else text)
        result.add_row(str(partition), *cells)
    return result


def probe_table(measured: Probe) -> Table:
    """Bandwidths by links, operation and size."""
    topology = measured.topology
    result = Table(
        title=f"{topology.world_size} ranks in {topology.num_groups} groups of {topology.group_size}",
        caption=f"What one rank sends, from and to {measured.device}; medians.",
    )
    for name in ("links", "operation"):
        result.add_column(name)
    for name in ("MiB", "ms", "Gbit/s"):
        result.add_column(name, justify="right")
    for sample in measured.samples:
        numbers = (sample.nbytes / 2**20, sample.seconds * 1e3, sample.bandwidth * 8 / 1e9)
        result.add_row(sample.links, sample.operation, *(f"{number:.3g}" for number in numbers))
    return result


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan in plain values, as it is written to JSON; bytes and seconds."""
    topology, workload = plan.network.topology, plan.workload
    return {
        "inputs": {
            "parameters": workload.parameters,
            "trainable": workload.trained,
            "world_size": topology.world_size,
            "group_size": topology.group_size,
            **{f"{name}_bytes_per_s": bandwidth for name, bandwidth in plan.network.bandwidths.items()},
            "nic": plan.network.nic,
            "accumulate": workload.accumulate,
            "compute_s": workload.compute,
            "activation_bytes": workload.activations,
            "rest": workload.rest,
            "largest_unit": workload.largest_unit,
            "bucket_bytes": workload.bucket_bytes,
            "bytes_per_parameter": vars(workload.sizes),
            "memory_bytes": plan.memory,
            "collectives": plan.algorithm,
        },
        "recommended": None if plan.recommended is None else str(plan.recommended.partition),
        "rows": [{"partition": str(row.partition), "runs_as": str(row.runs_as), **_values(row)} for row in plan.rows],
        "peers": [{"name": peer.name, **_values(peer)} for peer in plan.peers],
    }


def write_json(plans: Plan | Sequence[Plan], path: Path) -> None:
    """Write one plan, or a list of plans, as JSON."""
    content = as_dict(plans) if isinstance(plans, Plan) else [as_dict(plan) for plan in plans]
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_csv(plans: Plan | Sequence[Plan], path: Path) -> None:
    """Write the rows of one plan, or of several, as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("world_size", *_COLUMNS), extrasaction="ignore")
        writer.writeheader()
        for plan in [plans] if isinstance(plans, Plan) else plans:
            for row in plan.rows:
                facts = {"world_size": plan.network.topology.world_size, "recommended": row is plan.recommended}
                writer.writerow({"partition": str(row.partition), **_values(row), **facts})


def draw(plan: Plan, axes: Axes) -> None:
    """Memory against time, with the frontier of the rows that no other beats in both."""
    for row in plan.rows:
        memory, seconds = row.cost.memory_bytes / 1e9, row.cost.step_s
        axes.plot(memory, seconds, "o", color="tab:blue" if row.fits else "lightgray")
        chosen = row is plan.recommended
        weight = "bold" if chosen else "normal"
        axes.annotate(str(row.partition), (memory, seconds), (4, 4), textcoords="offset points", weight=weight)
    frontier = plan.frontier()
    axes.step(
        [row.cost.memory_bytes / 1e9 for row in frontier], [row.cost.step_s for row in frontier], where="post", lw=1
    )
    axes.axvline(plan.memory / MARGIN / 1e9, color="tab:red", ls="--", lw=1, label="memory, less 5 %")
    axes.set(xlabel="memory of a rank, GB", ylabel="seconds a step", xscale="log", yscale="log")
    axes.legend()
    for axis in (axes.xaxis, axes.yaxis):
        _plain(axis)


def draw_scaling(plans: Sequence[Plan], axes: Axes) -> None:
    """Seconds a step against the number of ranks: a line for each partition that fits somewhere."""
    lines: dict[tuple[tuple[int, str], ...], list[str]] = {}  # those of the same times are one line
    for partition in Partition.valid():
        points = tuple(
            (plan.network.topology.world_size, _seconds(row.cost.step_s))
            for plan in plans
            for row in plan.rows
            if row.partition == partition and row.fits
        )
        lines.setdefault(points, []).append(str(partition))
    for points, names in lines.items():
        if points:
            ranks, seconds = [point[0] for point in points], [float(point[1]) for point in points]
            axes.plot(ranks, seconds, "o-", ms=3, lw=1, label=", ".join(names))
        else:
            axes.set_title(f"not shown, for they fit nowhere: {', '.join(names)}", fontsize=9)
    if lines.keys() != {()}:
        axes.legend(fontsize=8)
    axes.set(xlabel="ranks", ylabel="seconds a step", yscale="log")
    axes.set_xscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        _plain(axis)


def _seconds(seconds: float) -> str:
    """Three digits, the same for what differs by rounding only."""
    return f"{float(f'{seconds:.9g}'):#.3g}"


def _plain(axis: Axis) -> None:
    """Numbers instead of powers along a logarithmic axis."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


def _numbers(row: Row | Peer) -> tuple[str, ...]:
    spent = row.cost
    tps = _tps(row)
    return (
        f"{spent.memory_bytes / 1e9:#.4g}",
        _seconds(spent.comm_s),
        _seconds(spent.step_s),
        "" if tps is None else f"{tps:.2f}",
        "yes" if row.fits else "no",
    )


def _values(row: Row | Peer) -> dict[str, Any]:
    spent = row.cost
    return {
        "memory_bytes": spent.memory_bytes,
        "state_bytes": spent.state_bytes,
        "comm_s": spent.comm_s,
        "gather_s": spent.gather_s,
        "reduce_s": spent.reduce_s,
        "sync_g_s": spent.sync_g_s,
        "sync_p_s": spent.sync_p_s,
        "compute_s": spent.compute_s,
        "step_s": spent.step_s,
        "tps": _tps(row),
        "fits": row.fits,
    }


def _tps(row: Row | Peer) -> float | None:
    """The paper's indicator, log(1/T); None where nothing takes time."""
    return -math.log(row.cost.step_s) if row.cost.step_s > 0 else None
