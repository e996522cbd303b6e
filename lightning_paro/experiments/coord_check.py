"""A coordinate check: do activations stay where they were when a model becomes wider or sparser?"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_paro.algorithms.supar import Parameterization
from lightning_paro.callbacks import CoordCheck
from lightning_paro.experiments._settings import Make, settings_of, shown, train
from lightning_paro.experiments._written import panels, write_rows

__all__ = ["CoordReport", "coord_check"]

Key = tuple[str, int, float, str, int]


@dataclass(frozen=True)
class CoordReport:
    """What a coordinate check has found.

    Attributes:
        rows: By run, step and module: ``parameterization``, ``width``, ``density``, ``seed``, ``step``, ``module``, and
            ``value``, the mean absolute activation.
    """

    rows: Sequence[Mapping[str, Any]]

    def means(self) -> dict[Key, float]:
        """The mean over seeds, by parameterization, width, density, module and step."""
        found: dict[Key, list[float]] = {}
        for row in self.rows:
            key = (row["parameterization"], row["width"], row["density"], row["module"], row["step"])
            found.setdefault(key, []).append(row["value"])
        return {key: statistics.fmean(values) for key, values in found.items()}

    def ratios(self) -> dict[Key, float]:
        """Every mean as a multiple of that of the largest density, of the same width, module and step.

        It is infinite where one of the two has diverged, or that of the largest density alone is zero.
        """
        means = self.means()
        dense = max(density for _, _, density, _, _ in means)
        return {key: _ratio(value, means[key[0], key[1], dense, key[3], key[4]]) for key, value in means.items()}

    def deviation(self, parameterization: str) -> float:
        """The largest deviation of any activation from that of the dense model, as a share of it.

        It is infinite if activations have diverged.

        Raises:
            ValueError: If there are none of that parameterization.
        """
        found = [abs(ratio - 1) for key, ratio in self.ratios().items() if key[0] == parameterization]
        if not found:
            there = ", ".join(dict.fromkeys(row["parameterization"] for row in self.rows))
            raise ValueError(f"there are no rows of {parameterization!r}; expected one of {there}.")
        return max(found)

    def __rich__(self) -> Table:
        table = Table(title="Activations as a multiple of the dense model's: least and largest over modules and steps")
        densities = sorted({row["density"] for row in self.rows}, reverse=True)
        table.add_column("parameterization")
        table.add_column("width", justify="right")
        for density in densities:
            table.add_column(f"ρ = {density:.4g}", justify="right")
        ratios = self.ratios()
        for name, width in dict.fromkeys((row["parameterization"], row["width"]) for row in self.rows):
            cells = []
            for density in densities:
                mine = [ratio for key, ratio in ratios.items() if key[:3] == (name, width, density)]
                cells.append(f"{min(mine):.3g} … {max(mine):.3g}")
            table.add_row(name, str(width), *cells)
        return table

    def write_csv(self, path: str | Path) -> None:
        """Write the rows."""
        write_rows(path, self.rows)

    def write_json(self, path: str | Path) -> None:
        """Write the means over seeds."""
        names = ("parameterization", "width", "density", "module", "step")
        rows = [{**dict(zip(names, key, strict=True)), "value": value} for key, value in self.means().items()]
        Path(path).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")

    def plot(self, path: str | Path, modules: Sequence[str] = ()) -> None:
        """Draw activations against density, a panel a parameterization, a line a module, at the last step.

        Args:
            path: Of the picture.
            modules: Which; those of one block and both ends unless told.

        Raises:
            ImportError: If there is no matplotlib.
        """
        means = self.means()
        names = list(modules) or list(dict.fromkeys(key[3] for key in means))
        models = list(dict.fromkeys((key[0], key[1]) for key in means))
        last = max(key[4] for key in means)
        with panels(path, models, "density", f"mean absolute activation, step {last}") as every:
            for axes, model in zip(every, models, strict=True):
                for name in names:
                    mine = sorted((k[2], v) for k, v in means.items() if k[:2] == model and k[3:] == (name, last))
                    axes.plot([density for density, _ in mine], [v for _, v in mine], marker=".", label=name)
                axes.set_yscale("log")


def _ratio(value: float, dense: float) -> float:
    if not math.isfinite(value) or not math.isfinite(dense):
        return math.inf  # NaN would be lost among others
    if not dense:
        return math.inf if value else 1.0
    return value / dense


def coord_check(
    make: Make,
    data: Any,
    *,
    widths: Sequence[int],
    densities: Sequence[float] = (1.0, 1 / 4, 1 / 16),
    parameterizations: Sequence[Parameterization] = ("sp", "mup", "supar"),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 10,
    modules: Sequence[str] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> CoordReport:
    """Train a few steps of every setting, and compare how large activations are.

    Args:
        make: Makes the module of a :class:`Setting`; it is to use its plan for ``setting.width`` and so on.
        data: A dataloader; every run begins it anew.
        widths: Of the model.
        densities: Share of weights that are kept; the largest is what others are compared with.
        parameterizations: Which to compare.
        seeds: Of initial values and masks; values are means over them.
        steps: Optimizer steps.
        modules: Names of the modules to watch; None are blocks and all that hold a matrix.
        trainer: Arguments of every run's Trainer, such as ``{"accelerator": "gpu", "precision": "bf16-mixed"}``.

    Returns:
        A report; print it with rich, or write it.

    Raises:
        ValueError: If an argument is not understood.
    """
    rows: list[dict[str, Any]] = []
    for setting in shown(settings_of(parameterizations, widths, densities, seeds), "coordinate check"):
        check = CoordCheck(steps, modules)
        train(make, setting, data, steps, [check], trainer or {})
        about = {key: value for key, value in setting.row().items() if key != "lr"}
        rows += [{**about, "step": r["step"], "module": r["module"], "value": r["value"]} for r in check.rows]
    return CoordReport(rows)
