"""Mixins for LightningModules."""

from lightning_paro.mixins.supar import SuParMixin

__all__ = ["SuParMixin"]
