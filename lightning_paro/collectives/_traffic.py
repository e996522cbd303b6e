"""How many bytes a rank sent."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Bytes that this rank sent in collectives: one of T bytes over k ranks sends ``T * (k-1) / k``."""

    intra: int = 0
    inter: int = 0
    control: int = 0
    calls: int = 0

    def reset(self) -> None:
        """Start counting from zero."""
        self.intra = self.inter = self.control = self.calls = 0
