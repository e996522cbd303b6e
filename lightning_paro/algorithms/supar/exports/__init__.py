"""What was trained, as an ordinary model or as files: factors in the weights or the config, masks beside or inside."""

from lightning_paro.algorithms.supar.exports.export import export
from lightning_paro.algorithms.supar.exports.saved import load_masked, save_masked
from lightning_paro.algorithms.supar.exports.semi_structured import Timing, Timings

__all__ = ["Timing", "Timings", "export", "load_masked", "save_masked"]
