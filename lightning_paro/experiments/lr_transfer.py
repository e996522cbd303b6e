"""Does the best learning rate stay the same when a model becomes wider or sparser?"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from torch import Tensor

from lightning_paro.algorithms.supar import Parameterization
from lightning_paro.experiments._settings import Make, Setting, check_choices, settings_of, shown, train
from lightning_paro.experiments._written import panels, write_rows

__all__ = ["Optimum", "TransferReport", "final_loss", "lr_transfer_sweep"]

Row = Mapping[str, Any]
Model = tuple[str, int, float]
"""Parameterization, width, density."""

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by number of seeds."""


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of a model.

    Attributes:
        log2_lr: Its logarithm to base 2, between the rates of the sweep: the vertex of the parabola through the lowest
            mean loss and its neighbours.
        loss: The lowest mean loss of the sweep.
        is_at_end: Whether that is at an end of the sweep, so that the best may lie outside.
        shift: In octaves, against the model that would be tuned: of the same parameterization, and of the sweep the
            narrowest, and the densest of these. The mean over seeds.
        half_width: Of the 95 % interval of that, by Student's t over seeds; None with one seed.
        regret: What that model's best rate of the sweep costs here: the mean loss there, less the lowest.
    """

    log2_lr: float
    loss: float
    is_at_end: bool
    shift: float
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
        means = {model: _mean(by_seed) for model, by_seed in losses.items()}
        found = {}
        for (kind, width, density), by_seed in losses.items():
            mean = means[kind, width, density]
            base = (kind, tuned[kind][0], -tuned[kind][1])
            shifts = [best_log2(by_seed[seed])[0] - best_log2(losses[base][seed])[0] for seed in by_seed]
            spread = statistics.stdev(shifts) / math.sqrt(len(shifts)) if len(shifts) > 1 else None
            half = None if spread is None else T_95.get(len(shifts), 1.96) * spread
            log2_lr, is_at_end = best_log2(mean)
            regret = mean[min(means[base], key=means[base].__getitem__)] - min(mean.values())
            found[kind, width, density] = Optimum(
                log2_lr, min(mean.values()), is_at_end, statistics.fmean(shifts), half, regret
            )
        return found

    def _losses(self) -> dict[Model, dict[int, dict[float, float]]]:
        """By model, seed and learning rate."""
        found: dict[Model, dict[int, dict[float, float]]] = {}
        for row in self.rows:
            model = (row["parameterization"], row["width"], row["density"])
            found.setdefault(model, {}).setdefault(row["seed"], {})[row["lr"]] = row["loss"]
        return found

    def __rich__(self) -> Table:
        table = Table(title="The best learning rate, and its shift in octaves against the narrowest and densest model")
        for name in ("parameterization", "width", "density", "log2 of the best", "shift", "95 %", "loss", "regret"):
            table.add_column(name, justify="left" if name == "parameterization" else "right")
        for (kind, width, density), best in self.optima().items():
            end = " (end)" if best.is_at_end else ""
            interval = f"± {best.half_width:.2f}" if best.half_width else ""  # none of that model itself
            table.add_row(
                kind, str(width), f"{density:.4g}", f"{best.log2_lr:.2f}{end}", f"{best.shift:+.2f}", interval,
                f"{best.loss:.4f}", f"{best.regret:.4f}",
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


def _mean(by_seed: Mapping[int, Mapping[float, float]]) -> dict[float, float]:
    """The mean loss over seeds, by learning rate."""
    return {lr: statistics.fmean(losses[lr] for losses in by_seed.values()) for lr in next(iter(by_seed.values()))}


def best_log2(losses: Mapping[float, float]) -> tuple[float, bool]:
    """The learning rate of the lowest loss as a power of two, and whether it is at an end of the sweep.

    Args:
        losses: By learning rate.
    """
    lrs = sorted(losses)
    place = min(range(len(lrs)), key=lambda index: losses[lrs[index]])
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
        path: A file of JSON lines, to which each run is written when it is done, and whose runs are not made again.
        trainer: Arguments of every run's Trainer, such as ``{"accelerator": "gpu", "precision": "bf16-mixed"}``.

    Returns:
        A report; print it with rich, or write it.

    Raises:
        ValueError: If an argument is not understood, or the file is of another sweep.
    """
    check_choices(parameterizations, widths, densities, seeds)
    if len(set(lrs)) < 2 or any(not 0 < lr < math.inf for lr in lrs):
        raise ValueError(f"lrs={lrs!r}: expected two or more different positive numbers.")
    _check_mode(mode)
    losses = _earlier(path, {"mode": mode, "steps": steps})
    settings = settings_of(parameterizations, widths, densities, seeds, lrs)
    for setting in shown(settings, "learning rates"):
        if setting in losses:
            continue
        losses[setting] = final_loss(make, data, setting, steps=steps, mode=mode, trainer=trainer)
        if path is not None:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(_row(setting, losses[setting])) + "\n")
    return TransferReport([_row(setting, losses[setting]) for setting in settings])


def _row(setting: Setting, loss: float) -> dict[str, Any]:
    return setting.row() | {"loss": loss}


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
        ValueError: If an argument is not understood.
    """
    _check_mode(mode)
    losses = _Losses()
    callbacks: list[Callback] = [losses]
    if mode == "hidden":
        assert setting.lr is not None
        callbacks.append(_HiddenRate(setting.lr))
        setting = Setting(setting.parameterization, setting.width, setting.density, setting.seed)
    train(make, setting, data, steps, callbacks, trainer or {})
    last = [float(loss) for loss in losses.seen[-max(len(losses.seen) // 10, 1) :]]
    mean = statistics.fmean(last)
    return mean if math.isfinite(mean) else math.inf


def _check_mode(mode: str) -> None:
    if mode not in ("global", "hidden"):
        raise ValueError(f"mode={mode!r} is not understood: expected 'global' or 'hidden'.")


class _Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.seen.append(torch.as_tensor(loss).detach())


class _HiddenRate(Callback):
    """Gives hidden weights a base learning rate of their own."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = False
        for optimizer in trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                if not group.get("is_hidden"):
                    continue
                found = True
                scale = self.lr * group["lr_factor"] / group.get("initial_lr", group["lr"])
                for key in ("lr", "initial_lr", "lr_factor"):  # the guard compares rates with factors
                    if key in group:
                        group[key] *= scale
                for config in trainer.lr_scheduler_configs:
                    scheduler: Any = config.scheduler
                    for each in getattr(scheduler, "_schedulers", [scheduler]):  # those of SequentialLR
                        if each.optimizer is optimizer and hasattr(each, "base_lrs"):
                            each.base_lrs[number] *= scale
        if not found:
            raise ValueError(
                f"mode='hidden', but the optimizer of {type(pl_module).__name__} has no group of hidden weights. HINT: "
                "give it supar_param_groups(...)."
            )


def _earlier(path: str | Path | None, about: Mapping[str, Any]) -> dict[Setting, float]:
    """The losses of a file, by run; one that is not there is begun."""
    if path is None:
        return {}
    if not Path(path).exists():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(about) + "\n", encoding="utf-8")
        return {}
    head, *rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if head != about:
        raise ValueError(f"{path} is of another sweep: {head} there, {dict(about)} here. HINT: give another file.")
    return {Setting(**{key: value for key, value in row.items() if key != "loss"}): row["loss"] for row in rows}
