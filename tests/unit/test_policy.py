"""The precision table of docs/paro.md as values: which dtype each piece of model state has."""

from __future__ import annotations

import pytest
import torch

from lightning_paro.sharding import PrecisionPolicy

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("own", FLOATS + OTHERS)
def test_the_default_policy_changes_no_dtype(own: torch.dtype) -> None:
    policy = PrecisionPolicy()
    assert policy.compute_dtype(own) is own
    assert policy.master_dtype(own) is own


@pytest.mark.parametrize("own", FLOATS)
def test_a_compute_dtype_goes_for_what_autocast_casts(own: torch.dtype) -> None:
    assert PrecisionPolicy(torch.bfloat16).compute_dtype(own) is torch.bfloat16
    assert PrecisionPolicy(torch.float16).compute_dtype(own) is torch.float16


@pytest.mark.parametrize("own", OTHERS)
@pytest.mark.parametrize("master_weights", [True, False])
def test_what_autocast_leaves_alone_is_left_alone(own: torch.dtype, master_weights: bool) -> None:
    policy = PrecisionPolicy(torch.bfloat16, master_weights)
    assert policy.compute_dtype(own) is own
    assert policy.master_dtype(own) is own


@pytest.mark.parametrize("own", FLOATS)
def test_masters_keep_the_dtype_a_parameter_came_with(own: torch.dtype) -> None:
    assert PrecisionPolicy(torch.bfloat16, master_weights=True).master_dtype(own) is own
    assert PrecisionPolicy(torch.bfloat16, master_weights=False).master_dtype(own) is torch.bfloat16


def test_a_policy_is_a_value() -> None:
    """Ranks compare it as text before they shard anything."""
    assert PrecisionPolicy(torch.bfloat16, True) == PrecisionPolicy(param_dtype=torch.bfloat16, master_weights=True)
    assert str(PrecisionPolicy(torch.bfloat16)) != str(PrecisionPolicy(torch.float16))
    with pytest.raises(AttributeError):
        PrecisionPolicy().param_dtype = torch.float16  # type: ignore[misc]
