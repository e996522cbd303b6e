"""How large activations are in the first steps, by module: whether a parameterization keeps them where they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_paro.algorithms.supar.activations import Activations, watched
from lightning_paro.callbacks import _reports

__all__ = ["CoordCheck"]


class CoordCheck(Callback):
    """Records the mean absolute activation of modules in each of the first steps.

    With a parameterization that transfers, curves of models of different width and density lie on each other; with one
    that does not they fan out. Loggers get ``coord/<module>``; ``coord_check.csv`` and, with matplotlib,
    ``coord_check.png`` are in the first logger's folder. :func:`~lightning_paro.experiments.coord_check` runs it over
    widths, densities and seeds.

    Reference: Dey et al. 2024, figure 5; Yang et al., "Tensor Programs V", appendix D.1.

    Args:
        steps: Optimizer steps to record; with accumulation the mean over micro-batches. Only calls of training count,
            not those of validation.
        modules: Names of the modules to watch; None are the repeated blocks and all that hold a matrix.

    Raises:
        ValueError: If an argument is not understood.
    """

    def __init__(self, steps: int = 10, modules: Sequence[str] | None = None) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps={steps!r} must be a whole number, 1 or more.")
        if isinstance(modules, str):
            raise ValueError(f"modules={modules!r} must be several names. HINT: modules=[{modules!r}].")
        self.steps = steps
        self.modules = modules
        self.rows: list[dict[str, Any]] = []
        """By step and module: ``step``, ``module``, ``m_d``, ``density``, ``parameterization``, ``value``."""
        self._activations: Activations | None = None
        self._begun, self._step = 0, 0  # optimizer steps
        self._folder: str | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rows, self._step, self._begun = [], trainer.global_step, trainer.global_step
        self._folder = trainer.log_dir if trainer.loggers else None
        names = watched(pl_module) if self.modules is None else list(self.modules)
        self._activations = Activations(pl_module, names)
        self._activations.is_paused = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._activations is not None:
            self._activations.is_paused = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._activations is None:
            return
        self._activations.is_paused = True  # validation comes between batches; what is frozen is in eval mode anyway
        if trainer.global_step == self._step:
            return  # in the middle of an accumulation
        self._step = trainer.global_step
        found = self._activations.read()
        plan: Any = getattr(pl_module, "supar_plan", None)
        about = {"m_d": None, "density": None, "parameterization": None}
        if plan is not None:
            about = {"m_d": plan.width, "density": plan.masks.density, "parameterization": plan.parameterization}
        step = self._step - self._begun - 1
        self.rows += [{"step": step, "module": name, **about, "value": value} for name, value in found.items()]
        if not trainer.barebones:
            pl_module.log_dict({f"coord/{name}": value for name, value in found.items()}, batch_size=1)
        if step + 1 >= self.steps:
            self._finish(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._activations is not None:
            self._activations.close()
            self._activations = None

    def _finish(self, trainer: Trainer) -> None:
        if self._activations is None:
            return
        self._activations.close()
        self._activations = None
        if self._folder is not None and trainer.is_global_zero and self.rows:
            _write(self._folder, self.rows)


def _write(folder: str, rows: Sequence[dict[str, Any]]) -> None:
    _reports.write_table("CoordCheck", f"{folder}/coord_check.csv", list(rows[0]), (list(row.values()) for row in rows))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        rank_zero_info(
            f"CoordCheck wrote {folder}/coord_check.csv; for a picture: pip install 'lightning_paro[plots]'."
        )
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(row["module"] for row in rows):
        mine = [row for row in rows if row["module"] == name]
        axes.plot([row["step"] for row in mine], [row["value"] for row in mine], label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("mean absolute activation")
    axes.legend(fontsize="xx-small", loc="center left", bbox_to_anchor=(1, 0.5))
    with _reports.told("CoordCheck", f"{folder}/coord_check.png"):
        _reports.save_figure(figure, f"{folder}/coord_check.png")
        rank_zero_info(f"CoordCheck wrote {folder}/coord_check.png, and coord_check.csv beside it.")
