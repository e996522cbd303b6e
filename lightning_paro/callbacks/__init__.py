"""Callbacks for a Trainer: thin shells around the pure functions in ``algorithms``."""

from lightning_paro.callbacks.lisa import LISA

__all__ = ["LISA"]
