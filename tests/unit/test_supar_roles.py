"""Roles and widths of what is no stack of linear layers: convolutions, experts, tables, projections out of place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, OPTConfig, OPTForCausalLM

from lightning_paro.algorithms.supar import Masks, SuParPlan
from lightning_paro.algorithms.supar.masks import as_rows, draw_mask
from lightning_paro.algorithms.supar.roles import without_role
from lightning_paro.algorithms.supar.scales import hooks_of, scale_forward


def _convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Conv2d(width, 10, 3)
    )


def _factors(plan: SuParPlan) -> dict[str, Any]:
    return {name: (e.role, e.m_d, e.lr_factor, e.sgd_lr_factor, e.init_std) for name, e in plan.items()}


@pytest.mark.parametrize("width", [16, 64])
def test_the_width_of_convolutions_is_that_of_their_channels(width: int) -> None:
    by_width = SuParPlan.from_model(_convolutions(width), base_width=16)
    by_model = SuParPlan.from_model(_convolutions(width), base_config=_convolutions(16))
    assert _factors(by_width) == _factors(by_model)
    assert by_width["2.weight"].m_d == width / 16
    assert by_width.output_scale == by_model.output_scale == 16 / width


def test_a_width_that_is_not_known_is_asked_for() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3), nn.Conv2d(width, width, 3), nn.Flatten(), nn.Linear(width * 16, 10)
        )

    with pytest.raises(ValueError, match="made of 1024 numbers.*the first has 64.*HINT: base_config="):
        SuParPlan.from_model(build(64), base_width=16)
    plan = SuParPlan.from_model(build(64), base_config=build(16))
    assert plan["1.weight"].m_d == plan.width == 4


def test_transposed_convolutions_sum_over_their_first_dimension() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(
            nn.ConvTranspose1d(8, width, 3), nn.ConvTranspose1d(width, width, 3), nn.ConvTranspose1d(width, 4, 3)
        )

    roles = {"0.weight": "embedding", "1.weight": "hidden", "2.weight": "output"}
    told = {name: {"role": role} for name, role in roles.items()}
    for base in ({"base_width": 16}, {"base_config": build(16)}):
        plan = SuParPlan.from_model(build(64), overrides=told, **base)  # type: ignore[arg-type]
        assert (plan["1.weight"].m_d, plan["1.weight"].lr_factor, plan.output_scale) == (4, 0.25, 0.25)


def test_experts_that_are_kept_transposed() -> None:
    def build(width: int) -> nn.Module:
        config = GptOssConfig(
            hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
            num_key_value_heads=2, vocab_size=32, num_local_experts=4, layer_types=["full_attention"] * 2,
        )  # fmt: skip
        with torch.device("meta"):
            return GptOssForCausalLM(config)

    told = dict.fromkeys(("*_proj", "*router*", "*sinks*"), {"role": "hidden"}) | {"*sinks*": {"role": "vector"}}
    plan = SuParPlan.from_model(build(64), base_config=build(16), overrides=told)
    experts = {name.rpartition(".")[2]: entry for name, entry in plan.items() if ".0.mlp.experts" in name}
    assert (experts["gate_up_proj"].fan_in, experts["gate_up_proj"].m_d) == (64, 4)
    assert (experts["down_proj"].fan_in, experts["down_proj"].m_d) == (32, 1)


@pytest.mark.parametrize(("shape", "axis"), [((3, 8, 12), -2), ((8, 6, 4), 0), ((3, 8, 12), 2), ((8, 4, 2), 1)])
def test_masks_go_along_the_fan_in(shape: tuple[int, ...], axis: int) -> None:
    mask = draw_mask(Masks("nm", n=1, m=4), "w", shape, axis, 0.25)
    rows = as_rows(mask, axis)
    assert mask.shape == shape
    assert rows.shape[1] % 4 == 0
    assert torch.equal(rows.reshape(-1, 4).sum(1), torch.ones(mask.numel() // 4, dtype=torch.long))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("told", [{}, {"0.weight": {"role": "embedding"}}])
def test_behind_a_table_the_first_projection_is_hidden(table: Any, told: Any) -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(table(50, width), nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 5))

    plan = SuParPlan.from_model(build(64), base_config=build(16), density=0.5, overrides=told)
    assert (plan["1.weight"].role, plan["1.weight"].rho, plan["1.weight"].lr_factor) == ("hidden", 0.5, 0.5)
    assert plan["0.weight"].sgd_lr_factor == 4


def test_behind_what_is_told_to_read_the_input_it_is_too() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.inner, self.head = nn.LSTM(8, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    told = {"lstm.weight_ih_l0": {"role": "embedding"}, "lstm.weight_hh_l0": {"role": "hidden"}}
    plan = SuParPlan.from_model(Recurrent(), base_width=8, overrides=told)
    assert [plan[f"{name}.weight"].role for name in ("inner", "head")] == ["hidden", "output"]


class Positions(nn.Module):
    def __init__(self, width: int, shape: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, width), nn.Parameter(torch.zeros(*shape, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(width, 16)


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_positions_are_rows_of_the_width(shape: tuple[int, ...]) -> None:
    assert without_role(Positions(64, shape)) == ["places"]
    told = {"places": {"role": "embedding"}}
    base = Positions(16, shape)
    plan = SuParPlan.from_model(Positions(64, shape), base_config=base, overrides=told)
    assert (plan["places"].m_d, plan["places"].lr_factor, plan["places"].sgd_lr_factor) == (1, 1, 4)


def test_positions_that_are_told_do_not_read_the_input() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.patches = nn.Parameter(torch.zeros(8, 32)), nn.Linear(12, 32)
            self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 5)

    plan = SuParPlan.from_model(Patches(), base_width=8, overrides={"places": {"role": "embedding"}})
    assert [plan[f"{name}.weight"].role for name in ("patches", "inner", "head")] == ["embedding", "hidden", "output"]


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))


def test_a_projection_before_the_blocks_that_may_be_the_head_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"no role is known of 'head.weight' \(16, 32\) of Linear.*else 'output'"):
        SuParPlan.from_model(HeadFirst(), base_width=8)
    for role in ("output", "embedding"):
        plan = SuParPlan.from_model(HeadFirst(), base_width=8, overrides={"head.weight": {"role": role}})
        assert plan["head.weight"].role == role


def test_opts_projection_behind_the_blocks_is_hidden() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=64, do_layer_norm_before=False,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    plan = SuParPlan.from_model(model, base_width=16, alpha_input=4.0)
    roles = {name.split(".")[-2]: plan[name].role for name in plan if "project_" in name}
    assert roles == {"project_out": "hidden", "project_in": "embedding"}
    scale_forward(model, plan)
    assert not any("project_out" in name for name, _, _ in hooks_of(model))


def test_a_pattern_that_matches_nothing_is_told_before_roles_are_asked_for() -> None:
    with pytest.raises(ValueError, match="'plaecs' matches no tensor"):
        SuParPlan.from_model(Positions(64), base_width=16, overrides={"plaecs": {"role": "embedding"}})


def test_a_plan_is_of_pythons_own_values(tmp_path: Path) -> None:
    masks = tmp_path / "masks.pt"
    torch.save({"2.weight": torch.arange(256).view(16, 16) % 2 == 0}, masks)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    plan = SuParPlan.from_model(
        model, base_width=8, alpha_input=numpy.sqrt(2.0), init_std=numpy.float64(0.1),
        overrides={"0.weight": {"lr_factor": numpy.float64(0.5)}}, masks=Masks("file", path=masks),  # type: ignore[arg-type]
    )  # fmt: skip
    assert SuParPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    values = [plan.alpha_input, *(value for entry in plan.to_dict()["entries"].values() for value in entry.values())]
    assert not any(isinstance(value, numpy.generic) for value in values)
    assert type(plan.masks.path) is str


@pytest.mark.parametrize("name", ["masks.pt", "masks.safetensors"])
@pytest.mark.parametrize("content", [b"not a file of torch", [True], {"2.weight": torch.ones(16, 16)}])
def test_files_that_hold_no_masks(tmp_path: Path, content: Any, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=name):
        SuParPlan.from_model(nn.Linear(16, 16), base_width=8, masks=Masks("file", path=str(path)))


@pytest.mark.parametrize("options", [{"kind": "nm", "n": 2.0}, {"kind": "block", "block": 8.0}, {"n": True}])
def test_whole_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        Masks(**options)


# ---- factors of the forward --------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Reads the weight of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(self.layers[1](self.layers[0](self.tokens(tokens))), self.tokens.weight)


def test_an_output_that_no_module_makes_is_warned_of() -> None:
    model = Tied()
    plan = SuParPlan.from_model(model, base_width=8)
    with pytest.warns(UserWarning, match="no module of Tied is known to make the output.*0.25"):
        scale_forward(model, plan)


def test_a_recurrent_layer_that_reads_the_input_is_not_multiplied() -> None:
    model = nn.Sequential(nn.LSTM(8, 32))
    told = {"0.weight_ih_l0": {"role": "embedding"}, "0.weight_hh_l0": {"role": "hidden"}}
    scale_forward(model, SuParPlan.from_model(model, base_width=32, alpha_input=2.0, overrides=told))
    with pytest.raises(TypeError, match="LSTM reads the input and puts out a tuple.*HINT: alpha_input=1"):
        model(torch.ones(1, 1, 8))


class Mixing(nn.Module):
    """Attention by another name."""

    def __init__(self, **own: Any) -> None:
        super().__init__()
        vars(self).update(own)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).movedim(-3, 0).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=getattr(self, "scaling", None))
        return mixed.transpose(-2, -3).flatten(-2)


def test_attention_of_the_users_is_found_by_what_it_calls() -> None:
    model = nn.ModuleList(Mixing() for _ in range(2))
    with pytest.warns(UserWarning, match="Mixing.*HINT: give it an int head_dim and a float scaling"):
        scale_forward(model, SuParPlan.from_model(model, base_width=32))
    scaled = nn.ModuleList(Mixing(head_dim=16, scaling=16**-0.5) for _ in range(2))
    scale_forward(scaled, SuParPlan.from_model(scaled, base_width=32))
    assert [layer.scaling for layer in scaled] == [1 / 16, 1 / 16]
