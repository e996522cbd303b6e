"""Does the best learning rate stay the same when a model becomes wider or sparser?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback
from rich.table import Table

from lightning_paro.algorithms.supar import Parameterization
from lightning_paro.experiments._rates import GivenRate, HiddenRate, Losses
from lightning_paro.experiments._runs_file import add_run, earlier_runs, head_of, row_of
from lightning_paro.experiments._settings import Make, Setting, numbers, settings_of, shown, train
from lightning_paro.experiments._written import panels, write_rows

__all__ = ["Optimum", "TransferReport", "final_loss", "lr_transfer_sweep"]

Row = Mapping[str, Any]
Model = tuple[str, int, float]
"""Parameterization, width, density."""
Curves = Mapping[int, Mapping[float, float]]
"""Losses by seed and learning rate."""

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by number of seeds."""


def student_t(count: int) -> float:
    """Student's t at 97.5 % for the mean of so many values, two or more."""
    if count in T_95:
        return T_95[count]
    z, n = statistics.NormalDist().inv_cdf(0.975), count - 1
    # Cornish and Fisher's expansion in 1 / n
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of a model.

    Attributes:
        log2_lr: Its logarithm to base 2, between the rates of the sweep: the vertex of the parabola through the lowest
            mean loss and its neighbours. NaN if all have diverged.
        loss: The lowest mean loss of the sweep.
        is_at_end: Whether that is at an end of the sweep, so that the best may lie outside.
        shift: In octaves, against the model that would be tuned: of the same parameterization, and of the sweep the
            narrowest, and the densest of these. The mean over seeds of the shift of each seed's own optimum, so not
            the difference of two ``log2_lr``. NaN if all runs of a seed have diverged.
        is_shift_at_end: Whether an optimum of this model or of the tuned one, of the mean or of a seed, is at an end of
            the sweep, so that the shift is not to be trusted.
        half_width: Of the 95 % interval of the shift, by Student's t over seeds; None with one seed.
        regret: What the tuned model's best rate of the sweep costs here: the mean loss there, less the lowest. NaN if
            one of the two models has none.
    """

    log2_lr: float
    loss: float
    is_at_end: bool
    shift: float
    is_shift_at_end: bool
    half_width: float | None
    regret: float


@dataclass(frozen=True)
class TransferReport:
    """What a sweep has found.

    Attributes:
        rows: By run ``parameterization``, ``width``, ``density``, ``seed``, ``lr`` and ``loss``, which is infinite if
            the training diverged.
    """

    rows: Sequence[Row]

    def optima(self) -> dict[Model, Optimum]:
        """By parameterization, width and density."""
        losses = self._losses()
        tuned = {kind: min((w, -d) for k, w, d in losses if k == kind) for kind, _, _ in losses}
        return {
            (kind, width, density): _optimum(by_seed, losses[kind, tuned[kind][0], -tuned[kind][1]])
            for (kind, width, density), by_seed in losses.items()
        }

    def _losses(self) -> dict[Model, dict[int, dict[float, float]]]:
        """By model, seed and learning rate."""
        found: dict[Model, dict[int, dict[float, float]]] = {}
        for row in self.rows:
            model = (row["parameterization"], row["width"], row["density"])
            found.setdefault(model, {}).setdefault(row["seed"], {})[row["lr"]] = row["loss"]
        return found

    def __rich__(self) -> Table:
        table = Table(
            title="The best learning rate, and its shift in octaves against the narrowest and densest model",
            caption="shift: the mean over seeds of the shift of each seed's own optimum, so not the difference of two "
            "of the column before; (end): an optimum is at an end of the sweep, and the best may lie outside.",
        )
        for name in ("parameterization", "width", "density", "log2 of the best", "shift", "95 %", "loss", "regret"):
            table.add_column(name, justify="left" if name == "parameterization" else "right", overflow="fold")
        for (kind, width, density), best in self.optima().items():
            half = best.half_width or math.nan  # none of the tuned model itself
            table.add_row(
                kind, str(width), f"{density:.4g}", _cell(best.log2_lr, ".2f", best.is_at_end, "none"),
                _cell(best.shift, "+.2f", best.is_shift_at_end), "" if math.isnan(half) else f"± {half:.2f}",
                f"{best.loss:.4f}", _cell(best.regret, ".4f"),
            )  # fmt: skip
        return table

    def write_csv(self, path: str | Path) -> None:
        """Write the rows."""
        write_rows(path, self.rows)

    def plot(self, path: str | Path) -> None:
        """Draw mean loss against learning rate, a panel a parameterization and width, a line a density.

        Raises:
            ImportError: If there is no matplotlib.
        """
        losses = self._losses()
        models = list(dict.fromkeys(model[:2] for model in losses))
        with panels(path, models, "learning rate", "loss") as every:
            for model, by_seed in losses.items():
                lrs, means = zip(*sorted(_mean(by_seed).items()), strict=True)
                every[models.index(model[:2])].plot(lrs, means, marker=".", label=f"ρ = {model[2]:.4g}")


def _cell(value: float, form: str, is_at_end: bool = False, lost: str = "-") -> str:
    return lost if math.isnan(value) else f"{value:{form}}{' (end)' * is_at_end}"


def _optimum(by_seed: Curves, tuned: Curves) -> Optimum:
    """That of a model, compared with that of the tuned one."""
    mean, tuned_mean = _mean(by_seed), _mean(tuned)
    log2_lr, is_at_end = best_log2(mean)
    found = [(best_log2(by_seed[seed]), best_log2(tuned[seed])) for seed in by_seed]
    ends = [is_at_end, best_log2(tuned_mean)[1], *(end for pair in found for _, end in pair)]
    shifts = [mine - other for (mine, _), (other, _) in found]
    shift, half = statistics.fmean(shifts), None
    if len(shifts) > 1:
        spread = math.nan if math.isnan(shift) else statistics.stdev(shifts)
        half = student_t(len(shifts)) * spread / math.sqrt(len(shifts))
    given = min(tuned_mean, key=tuned_mean.__getitem__)
    regret = mean[given] - min(mean.values()) if math.isfinite(tuned_mean[given]) else math.nan
    return Optimum(log2_lr, min(mean.values()), is_at_end, shift, any(ends), half, regret)


def _mean(by_seed: Curves) -> dict[float, float]:
    """The mean loss over seeds, by learning rate."""
    return {lr: statistics.fmean(losses[lr] for losses in by_seed.values()) for lr in next(iter(by_seed.values()))}


def best_log2(losses: Mapping[float, float]) -> tuple[float, bool]:
    """The learning rate of the lowest loss as a power of two, and whether it is at an end of the sweep.

    NaN, and not at an end, if no loss is finite.

    Args:
        losses: By learning rate.
    """
    lrs = sorted(losses)
    place = min(range(len(lrs)), key=lambda index: losses[lrs[index]])
    if not math.isfinite(losses[lrs[place]]):
        return math.nan, False
    at = math.log2(lrs[place])
    if place in (0, len(lrs) - 1):
        return at, True
    left, right = (math.log2(lrs[place + side]) - at for side in (-1, 1))
    rise_left, rise_right = (losses[lrs[place + side]] - losses[lrs[place]] for side in (-1, 1))
    if not math.isfinite(rise_left + rise_right) or not rise_left + rise_right:
        return at, False
    # the parabola through (left, rise_left), (0, 0), (right, rise_right)
    slope_left, slope_right = rise_left / left, rise_right / right
    curvature = (slope_right - slope_left) / (right - left)
    return at - (slope_left - curvature * left) / (2 * curvature), False


def lr_transfer_sweep(
    make: Make,
    data: Any,
    *,
    lrs: Sequence[float],
    widths: Sequence[int],
    densities: Sequence[float] = (1.0, 1 / 4, 1 / 16),
    parameterizations: Sequence[Parameterization] = ("sp", "mup", "supar"),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 100,
    mode: Literal["global", "hidden"] = "global",
    path: str | Path | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Train a model at every learning rate, width, density and seed, and compare where the loss is lowest.

    The loss of a run is the mean training loss of the last tenth of its steps, at least of one.

    Args:
        make: Makes the module of a :class:`Setting`. With ``mode="global"`` its base learning rate is ``setting.lr``;
            with ``"hidden"`` that is None, and the module has a rate of its own.
        data: A dataloader; every run begins it anew.
        lrs: Base learning rates, two or more.
        widths: Of the model.
        densities: Share of weights that are kept; the largest is what others are compared with.
        parameterizations: Which to compare.
        seeds: Of initial values and masks; their intervals are in the report.
        steps: Optimizer steps of a run.
        mode: ``"global"``: the learning rate of all tensors is swept. ``"hidden"``: that of hidden weights only, all
            others keep the module's; the module's optimizer has to have groups of ``supar_param_groups``.
        path: A file of JSON lines, to which each run is written when it is done, and whose runs are not made again. It
            is for one module and one data: of the module it knows the name only, and nothing of the data.
        trainer: Arguments of every run's Trainer, such as ``{"accelerator": "gpu", "precision": "bf16-mixed"}``.

    Returns:
        A report; print it with rich, or write it.

    Raises:
        ValueError: If an argument is not understood, the file is of another sweep or cannot be read, or the module
            does not use ``setting.lr`` or returns no loss.
    """
    rates = numbers("lrs", lrs, float)
    if len(rates) < 2 or any(not 0 < lr < math.inf for lr in rates):
        raise ValueError(f"lrs={lrs!r}: expected two or more different positive numbers.")
    _check_mode(mode)
    settings = settings_of(parameterizations, widths, densities, seeds, rates)
    file = None if path is None else Path(path)
    losses = {} if file is None else earlier_runs(file, head_of(make, trainer or {}, mode=mode, steps=steps))
    for setting in shown(settings, "learning rates"):
        if setting in losses:
            continue
        losses[setting] = final_loss(make, data, setting, steps=steps, mode=mode, trainer=trainer)
        if file is not None:
            add_run(file, setting, losses[setting])
    return TransferReport([row_of(setting, losses[setting]) for setting in settings])


def final_loss(
    make: Make,
    data: Any,
    setting: Setting,
    *,
    steps: int,
    mode: Literal["global", "hidden"] = "global",
    trainer: Mapping[str, Any] | None = None,
) -> float:
    """One run of :func:`lr_transfer_sweep`, whose arguments these are.

    Returns:
        The mean training loss of the last tenth of its steps, at least of one; infinite if it is not finite.

    Raises:
        ValueError: If an argument is not understood, or the module does not use ``setting.lr`` or returns no loss.
    """
    _check_mode(mode)
    losses = Losses()
    callbacks: list[Callback] = [losses]
    if mode == "hidden":
        assert setting.lr is not None
        callbacks.append(HiddenRate(setting.lr))
        setting = Setting(setting.parameterization, setting.width, setting.density, setting.seed)
    elif setting.lr is not None:
        callbacks.append(GivenRate(setting.lr))
    train(make, setting, data, steps, callbacks, trainer or {})
    last = [float(loss) for loss in losses.seen[-max(len(losses.seen) // 10, 1) :]]
    mean = statistics.fmean(last)
    return mean if math.isfinite(mean) else math.inf


def _check_mode(mode: str) -> None:
    if mode not in ("global", "hidden"):
        raise ValueError(f"mode={mode!r} is not understood: expected 'global' or 'hidden'.")
