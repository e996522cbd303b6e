"""Sparse maximal update parameterization: rules, roles, masks, and the plan that they make for a model."""

from lightning_paro.algorithms.supar.exports import Timing, Timings, export, load_masked, save_masked
from lightning_paro.algorithms.supar.init import initialize, prefix_of
from lightning_paro.algorithms.supar.mask_state import MaskState
from lightning_paro.algorithms.supar.masks import Masks
from lightning_paro.algorithms.supar.plan import Entry, SuParPlan
from lightning_paro.algorithms.supar.rules import Parameterization
from lightning_paro.algorithms.supar.scales import scale_forward

__all__ = [
    "Entry",
    "MaskState",
    "Masks",
    "Parameterization",
    "SuParPlan",
    "Timing",
    "Timings",
    "export",
    "initialize",
    "load_masked",
    "prefix_of",
    "save_masked",
    "scale_forward",
]
