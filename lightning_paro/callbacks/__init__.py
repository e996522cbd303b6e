"""Callbacks for a Trainer: thin shells around the pure functions in ``algorithms``."""

from lightning_paro.callbacks.coord_check import CoordCheck
from lightning_paro.callbacks.lisa import LISA
from lightning_paro.callbacks.param_group_guard import ParamGroupGuard
from lightning_paro.callbacks.sparse_mask import SparseMask
from lightning_paro.callbacks.sparsity_report import SparsityReport

__all__ = ["LISA", "CoordCheck", "ParamGroupGuard", "SparseMask", "SparsityReport"]
