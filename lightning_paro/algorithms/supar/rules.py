"""How init, learning rate and weight decay of a tensor follow width and density, by three parameterizations.

Dey et al., "Sparse maximal update parameterization", NeurIPS 2024, table 1; for SGD appendix D.3.1, with the factors of
fan-out and fan-in that Yang et al. give for plain SGD. At density 1 SμPar is μP, at width multiplier 1 μP is SP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["PARAMETERIZATIONS", "ROLES", "Factors", "Parameterization", "Role", "factors"]

Parameterization = Literal["sp", "mup", "supar"]
PARAMETERIZATIONS: tuple[Parameterization, ...] = ("sp", "mup", "supar")

Role = Literal["embedding", "hidden", "output", "vector"]
ROLES: tuple[Role, ...] = ("embedding", "hidden", "output", "vector")
"""What a tensor is: of a fixed fan-in and a width as fan-out, of two widths, of a fixed fan-out, of one dimension."""


@dataclass(frozen=True)
class Factors:
    """What a tensor's base values are multiplied by.

    Attributes:
        std: Of the standard deviation at init.
        lr: Of the learning rate with Adam or AdamW.
        sgd_lr: Of the learning rate with SGD.
        decay: Of the weight decay, so that learning rate times decay is the same at every width and density.
        why: The rule, with numbers.
    """

    std: float
    lr: float
    sgd_lr: float
    decay: float
    why: str


def factors(
    parameterization: Parameterization, role: Role, m_in: float = 1.0, m_out: float = 1.0, rho: float = 1.0
) -> Factors:
    """The rule of a tensor.

    Args:
        parameterization: ``"sp"``, ``"mup"`` or ``"supar"``.
        role: What the tensor is.
        m_in: Fan-in as a multiple of the base model's, m_d in the paper.
        m_out: Fan-out as a multiple of the base model's.
        rho: Density, the share of weights that are not masked. Only SμPar looks at it.

    Raises:
        ValueError: If a number is not positive, or rho is above 1.
    """
    if not (m_in > 0 and m_out > 0 and 0 < rho <= 1):
        raise ValueError(f"m_in={m_in}, m_out={m_out}, rho={rho}: expected positive multipliers and a rho up to 1.")
    matrix = role != "vector"
    if parameterization == "sp":
        return Factors(1.0, 1.0, 1.0, float(matrix), "SP: as the base model" if matrix else "SP: no decay")
    if role == "hidden":
        kept = rho if parameterization == "supar" else 1.0
        scale = m_in * kept
        what = f"m_d·ρ = {m_in:g}·{rho:.4g}" if parameterization == "supar" else f"m_d = {m_in:g}"
        why = f"variance and Adam LR ÷ {what}"
        return Factors(1 / math.sqrt(scale), 1 / scale, m_out / m_in / kept, scale, why)
    sgd = m_in if role == "output" else m_out
    why = {
        "embedding": "as the base model, times α_input",
        "output": f"as the base model, times α_output ÷ m_d = {m_in:g}",
        "vector": "LR as the base model, no decay",
    }[role]
    return Factors(1.0, 1.0, sgd, float(matrix), why)
