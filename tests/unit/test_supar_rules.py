"""The table of the paper, and that learning rate times decay is what it was."""

from __future__ import annotations

import math

import pytest

from lightning_paro.algorithms.supar.rules import PARAMETERIZATIONS, ROLES, factors


@pytest.mark.parametrize("rho", [1.0, 0.25, 1 / 64])
@pytest.mark.parametrize("m", [1.0, 4.0])
def test_hidden_weights_as_in_table_one(m: float, rho: float) -> None:
    sp, mup, supar = (factors(name, "hidden", m, m, rho) for name in PARAMETERIZATIONS)
    assert (sp.std, sp.lr, sp.sgd_lr) == (1, 1, 1)
    assert (mup.std**2, mup.lr, mup.sgd_lr) == pytest.approx((1 / m, 1 / m, 1))
    assert (supar.std**2, supar.lr, supar.sgd_lr) == pytest.approx((1 / (m * rho), 1 / (m * rho), 1 / rho))
    for rule in (sp, mup, supar):
        assert rule.lr * rule.decay == pytest.approx(1)


@pytest.mark.parametrize("name", ["mup", "supar"])
@pytest.mark.parametrize("role", ["embedding", "output", "vector"])
def test_nothing_else_looks_at_width_or_density(name: str, role: str) -> None:
    rule = factors(name, role, 4.0 if role == "output" else 1.0, 1.0 if role == "output" else 4.0)  # type: ignore[arg-type]
    assert (rule.std, rule.lr) == (1, 1)
    assert rule.decay == (role != "vector")
    assert rule.sgd_lr == 4


@pytest.mark.parametrize("role", ROLES)
def test_dense_supar_is_mup_and_mup_at_the_base_width_is_sp(role: str) -> None:
    numbers = [
        {(r.std, r.lr, r.sgd_lr, r.decay) for r in (factors(a, role, m, m), factors(b, role, m, m))}  # type: ignore[arg-type]
        for a, b, m in (("supar", "mup", 3.0), ("mup", "sp", 1.0))
    ]
    assert [len(each) for each in numbers] == [1, 1]


def test_a_downward_projection_follows_its_own_fan_in() -> None:
    rule = factors("supar", "hidden", m_in=3.2, m_out=4.0, rho=0.5)
    assert (rule.std, rule.lr, rule.sgd_lr) == pytest.approx((1 / math.sqrt(1.6), 1 / 1.6, 4 / 3.2 / 0.5))


@pytest.mark.parametrize("numbers", [{"m_in": 0}, {"m_out": -1}, {"rho": 0}, {"rho": 1.01}])
def test_impossible_numbers(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected positive multipliers and a rho up to 1"):
        factors("supar", "hidden", **numbers)
