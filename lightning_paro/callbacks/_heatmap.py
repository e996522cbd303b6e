"""Which layers were trained when, as a table and as a picture: layer by period."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_paro.callbacks import _reports

__all__ = ["Period", "draw_heatmap", "write_heatmap", "write_table"]

Period = tuple[int, int, tuple[int, ...]]
"""Number of a period, optimizer steps before it, the layers it trains."""


def write_heatmap(folder: str, loggers: Sequence[Logger], names: Sequence[str], periods: Sequence[Period]) -> None:
    """Write ``lisa.csv`` and ``lisa.png`` into a folder, and the picture to TensorBoard; what fails is told.

    Args:
        folder: The logger's folder, which may be a remote one.
        loggers: The trainer's loggers.
        names: Names of the layers.
        periods: What was trained.
    """
    write_table(folder, names, periods)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rank_zero_info(f"LISA wrote {folder}/lisa.csv; for a picture: pip install 'lightning_paro[plots]'.")
        return
    with _reports.told("LISA", f"{folder}/lisa.png"):
        figure = Figure(figsize=(8, 1 + 0.16 * len(names)), layout="constrained")
        draw_heatmap(figure, names, periods)
        _reports.save_figure(figure, f"{folder}/lisa.png")
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("lisa", figure, global_step=periods[-1][1])
        rank_zero_info(f"LISA wrote which layers it trained to {folder}/lisa.png, and to lisa.csv beside it.")


def write_table(folder: str, names: Sequence[str], periods: Sequence[Period]) -> None:
    """Write ``lisa.csv`` into a folder; what fails is told."""
    rows = ([number, step, *(int(i in active) for i in range(len(names)))] for number, step, active in periods)
    _reports.write_table("LISA", f"{folder}/lisa.csv", ["period", "step", *names], rows)


def draw_heatmap(figure: Any, names: Sequence[str], periods: Sequence[Period]) -> None:
    """Draw layers against periods into a matplotlib figure; beside each layer, in how many periods it was trained."""
    axes = figure.add_subplot()
    grid = [[float(index in active) for _, _, active in periods] for index in range(len(names))]
    axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("period")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    counts = axes.secondary_yaxis("right")
    counts.set_yticks(range(len(names)), [f"{sum(row):.0f}" for row in grid], fontsize="x-small")
    axes.set_title("Layers trained by LISA")
