"""What a user reads who computes with a tensor that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paro.sharding._ghost import gradient_ghost, nan_ghost, released_class

USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda tensor: tensor + 1,
    "mul_": lambda tensor: tensor.mul_(2),
    "sum": lambda tensor: torch.sum(tensor),
    "data": lambda tensor: tensor.data,
    "T": lambda tensor: tensor.T,
}


def released() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.data = nan_ghost(parameter.shape, parameter.dtype, parameter.device)
    parameter.__class__ = released_class(parameter, "parameter 'head.weight' of unit 'head'")
    return parameter


@pytest.mark.parametrize("name", USES)
def test_a_released_parameter_names_itself_its_unit_the_use_and_the_remedy(name: str) -> None:
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=rf"'head.weight' of unit 'head'.*`{name}`.*full_param"),
    ):
        USES[name](released())


@pytest.mark.parametrize("name", USES)
def test_a_sharded_gradient_names_its_parameter_the_use_and_the_remedies(name: str) -> None:
    ghost = gradient_ghost(nn.Parameter(torch.ones(3, 2)), "head.weight", zero=lambda: None)
    with pytest.raises(RuntimeError, match=rf"'head.weight'.*`{name}`.*grad_norm.*gradient_clip_val.*trainable_shards"):
        USES[name](ghost)


def test_a_released_parameter_keeps_what_is_not_a_value_and_its_class_comes_back() -> None:
    parameter = released()
    assert (parameter.shape, parameter.numel(), parameter.dtype) == ((3, 2), 6, torch.float32)
    assert parameter.requires_grad
    assert isinstance(parameter, nn.Parameter)
    assert "released" in repr(parameter)
    parameter.__class__ = nn.Parameter
    assert type(parameter) is nn.Parameter
    assert torch.isnan(parameter).all()
