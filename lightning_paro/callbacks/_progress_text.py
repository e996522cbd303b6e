"""A text of one's own in the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

__all__ = ["ProgressText", "short"]


class ProgressText:
    """Adds a text to the metrics that a progress bar shows, whatever its class.

    Args:
        name: Shown in front of it.
        text: Returns it.
    """

    def __init__(self, name: str, text: Callable[[], str]) -> None:
        self._name = name
        self._text = text
        self._bar: Any = None

    def show(self, trainer: Trainer) -> None:
        """Begin to show it, if the Trainer has a bar."""
        self._bar = bar = trainer.progress_bar_callback
        if bar is not None:
            of_class = type(bar).get_metrics

            def get_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
                return {**of_class(bar, trainer, pl_module), self._name: self._text()}

            bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def hide(self) -> None:
        """Leave the bar as it was."""
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)
            self._bar = None


def short(number: int, unit: str = "") -> str:
    """Three digits and a power of ten."""
    value = float(f"{number:.3g}")
    power = min((len(f"{value:.0f}") - 1) // 3, 4)
    return f"{value / 1000**power:g} {('', 'k', 'M', 'G', 'T')[power]}{unit}".rstrip()
