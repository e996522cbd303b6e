"""What was measured of SμPar, as tables and pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.pictures import figure
from benchmarks.lab.supar_sweep_page import draw_iso, draw_sweep, tell_iso, tell_sweep
from benchmarks.lab.text import setup_line, table

__all__ = ["SUPAR", "draw_coords", "ratios", "tell_coords", "tell_formats", "tell_time"]

Report = dict[str, Any]
Row = dict[str, Any]
NAMES = {"sp": "SP", "mup": "μP", "supar": "SμPar"}


def ratios(rows: list[Row], kind: str, width: int, density: float) -> list[float]:
    """Every activation as a multiple of the dense model's, over modules and steps."""
    mine = [row for row in rows if (row["parameterization"], row["width"]) == (kind, width)]
    dense = {row["module"]: row["values"] for row in mine if row["density"] == 1}
    sparse = (row for row in mine if row["density"] == density)
    return [a / b for row in sparse for a, b in zip(row["values"], dense[row["module"]], strict=True)]


def _widths(part: Row) -> list[int]:
    return sorted({row["width"] for row in part["rows"]})


def tell_coords(report: Report, name: str) -> Iterator[str]:
    """A table for each model: the least and the largest ratio by density, and whether 25 % are kept."""
    for part in report["parts"]:
        rows = part["rows"]
        densities = sorted({row["density"] for row in rows}, reverse=True)
        for width in _widths(part):
            settings = ", ".join(f"{key} {part[key]:.4g}" for key in ("lr", "init_std", "alpha_input") if key in part)
            yield from (f"#### {part['model']}, width {width}", "", setup_line(part["setup"]), "")
            yield f"Base width {part['base']}, {settings}; means over {part['seeds']} seeds, {part['steps']} steps."
            yield ""
            found = {kind: {density: ratios(rows, kind, width, density) for density in densities} for kind in NAMES}
            yield from table({
                "density": [f"{density:.4g}" for density in densities[1:]],
                **{
                    told: [f"{min(found[kind][d]):.2g} … {max(found[kind][d]):.2g}" for d in densities[1:]]
                    for kind, told in NAMES.items()
                },
                "SμPar's largest deviation": [
                    f"{max(abs(ratio - 1) for ratio in found['supar'][density]):.0%}" for density in densities[1:]
                ],
            })  # fmt: skip
            yield ""
    yield "![Activations of one module against density](pictures/supar-coords.png)"


def draw_coords(report: Report, path: Path) -> None:
    """The last block's output projection at the last step, against density, a panel a model and width."""
    panels = [(part, width) for part in report["parts"] for width in _widths(part)]
    with figure(report, path, len(panels), 3) as axes:
        for axis, (part, width) in zip(axes, panels, strict=True):
            module = [row["module"] for row in part["rows"] if row["module"].endswith(("down", "down_proj"))][-1]
            for kind, told in NAMES.items():
                mine = [
                    r for r in part["rows"] if (r["parameterization"], r["width"], r["module"]) == (kind, width, module)
                ]
                mine.sort(key=lambda row: row["density"])
                axis.plot([row["density"] for row in mine], [row["values"][-1] for row in mine], marker=".", label=told)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("density")
            axis.set_title(f"{part['model']}, {width}\n{module.split('.', 2)[-1]}", fontsize=9)
        axes[0].set_ylabel("mean absolute activation", fontsize=9)
        axes[0].legend(fontsize=8)


def tell_time(report: Report, name: str) -> Iterator[str]:
    """Steps and peak memory of every way to mask, as they are and against dense training."""
    rows = report["rows"]
    dense = {row["subject"]: row for row in rows if row["arm"] == "dense"}
    yield from (setup_line(report["setup"]), "")
    yield from table({
        "model": [f"{row['parameters'] / 1e6:.0f} million, width {row['width']}" for row in rows],
        "batch": [f"{row['batch']} × {row['length']}" for row in rows],
        "masks": [WAYS[row["arm"]] for row in rows],
        "step, ms": [f"{1e3 * row['step_s']:.2f}" for row in rows],
        "of dense": [f"{row['step_s'] / dense[row['subject']]['step_s']:.3f}" for row in rows],
        "peak, GiB": [f"{row['peak_bytes'] / 2**30:.3f}" for row in rows],
        "over dense": [f"{row['peak_bytes'] / dense[row['subject']]['peak_bytes'] - 1:+.1%}" for row in rows],
    })  # fmt: skip


def tell_formats(report: Report, name: str) -> Iterator[str]:
    """Microseconds of a layer, dense and in each format; the fastest is bold."""
    rows = report["rows"]
    yield from (setup_line(report["setup"]), "")
    columns = {"out × in": [f"{row['out']} × {row['in']}" for row in rows], "rows": [str(row["rows"]) for row in rows]}
    for kind in rows[0]["us"]:
        cells = []
        for row in rows:
            time, fastest = row["us"][kind], min(filter(None, row["us"].values()))
            cells.append("none" if time is None else f"**{time:.0f}**" if time == fastest else f"{time:.0f}")
        columns[f"{kind}, µs"] = cells
    yield from table(columns)


WAYS = {"dense": "none", "masked": "SparseMask", "parametrized": "weight × mask in the forward"}

SUPAR: dict[str, tuple[Callable[[Report, str], Iterator[str]], dict[str, Callable[[Any, Path], None]]]] = {
    "supar_coords": (tell_coords, {"supar-coords.png": draw_coords}),
    "supar_global": (tell_sweep, {"supar-global.png": draw_sweep}),
    "supar_hidden": (tell_sweep, {"supar-hidden.png": draw_sweep}),
    "supar_hidden_low": (tell_sweep, {"supar-hidden-low.png": draw_sweep}),
    "supar_iso": (tell_iso, {"supar-iso.png": draw_iso}),
    "supar_time": (tell_time, {}),
    "supar_formats": (tell_formats, {}),
}
"""How each is told and drawn."""
