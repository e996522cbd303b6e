"""The Lightning face of PaRO-DP."""

from lightning_paro.strategies.paro import ParoStrategy
from lightning_paro.strategies.registry import register

__all__ = ["ParoStrategy", "register"]
