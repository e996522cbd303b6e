"""Every tensor has a role and the numbers that follow from it, in plain models and in those of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_paro.algorithms.supar import Masks, SuParPlan

WIDTH, INNER = 64, 160


def llama_config(width: int = WIDTH, inner: int = INNER, layers: int = 2, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=width // 16,
        num_key_value_heads=width // 32, head_dim=16, vocab_size=50, **options,
    )  # fmt: skip


def perceptron(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


class Residual(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward = nn.Linear(10, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(width)
        self.pool = nn.Linear(width, width)
        self.outward = nn.Linear(width, 3)


def roles(plan: SuParPlan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, entry in plan.items():
        if entry.role != "vector":
            found.setdefault(entry.role, []).append(name)
    return found


def test_a_perceptron() -> None:
    plan = SuParPlan.from_model(perceptron(), base_width=8, density=0.5, init_std=0.1, seed=3)
    assert roles(plan) == {"embedding": ["0.weight"], "hidden": ["2.weight"], "output": ["4.weight"]}
    hidden = plan["2.weight"]
    assert (hidden.fan_in, hidden.m_d, hidden.rho, hidden.lr_factor) == (32, 4, 0.5, 0.5)
    assert hidden.init_std == pytest.approx(0.1 / 2**0.5)
    assert (plan["0.weight"].rho, plan["0.weight"].lr_factor, plan["0.weight"].init_std) == (1, 1, 0.1)
    assert plan.output_scale == 0.25
    assert {plan[f"{layer}.bias"].weight_decay_factor for layer in (0, 2, 4)} == {0}
    assert {plan[f"{layer}.bias"].init_std for layer in (0, 2, 4)} == {0}
    assert plan["0.bias"].sgd_lr_factor == 4
    assert plan["4.bias"].sgd_lr_factor == 1  # as many in the base model
    assert plan.sparse == ["2.weight"]


def test_blocks_between_two_projections() -> None:
    plan = SuParPlan.from_model(Residual(), base_width=8, density=0.25)
    assert roles(plan)["embedding"] == ["inward.weight"]
    assert roles(plan)["output"] == ["outward.weight"]
    assert [name for name in roles(plan)["hidden"] if name not in plan.sparse] == ["pool.weight"]
    assert plan["pool.weight"].lr_factor == 0.25
    assert plan["norm.weight"].init_std is None


def test_gpt2_is_transposed_and_tied() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4))
    plan = SuParPlan.from_model(model, base_width=16, density=0.25)
    assert roles(plan)["embedding"] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert "output" not in roles(plan)
    assert "lm_head.weight" not in plan
    assert plan.width == 4
    attention, down = plan["transformer.h.0.attn.c_attn.weight"], plan["transformer.h.0.mlp.c_proj.weight"]
    assert (attention.axis, attention.fan_in, attention.lr_factor) == (0, 64, 1)
    assert down.fan_in == 256
    assert len(plan.sparse) == 8


def test_llama_by_a_config_follows_both_ratios() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config())
    plan = SuParPlan.from_model(model, base_config=llama_config(32, 40, layers=5), density=0.25)
    block = "model.layers.1."
    assert plan[f"{block}mlp.down_proj.weight"].m_d == 4
    assert plan[f"{block}mlp.up_proj.weight"].m_d == 2
    assert plan[f"{block}self_attn.k_proj.weight"].m_d == 2
    assert plan["lm_head.weight"].role == "output"
    assert plan.output_scale == 0.5
    assert plan["model.embed_tokens.weight"].m_d == 1


class Wrapped(LightningModule):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)


@pytest.mark.parametrize("base", [llama_config(32, 40), Wrapped(llama_config(32, 40))], ids=["config", "model"])
def test_a_lightning_module_beside_its_base(base: Any) -> None:
    plan = SuParPlan.from_model(Wrapped(llama_config()), base_config=base)
    assert plan["model.model.layers.0.mlp.down_proj.weight"].m_d == 4
    assert plan["model.model.layers.0.mlp.up_proj.weight"].m_d == 2


def test_torchs_own_transformer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 32), nn.TransformerEncoder(layer, 3), nn.Linear(32, 20))
    plan = SuParPlan.from_model(model, base_width=16, density=0.5)
    assert roles(plan)["embedding"] == ["0.weight"]
    assert roles(plan)["output"] == ["2.weight"]
    assert len(plan.sparse) == 3 * 4
    assert plan["1.layers.0.self_attn.in_proj_weight"].fan_in == 32


@pytest.mark.parametrize("parameterization", ["sp", "mup"])
def test_others_do_not_look_at_the_density_but_have_it(parameterization: Any) -> None:
    plan = SuParPlan.from_model(
        perceptron(), base_width=8, density=0.5, parameterization=parameterization, alpha_input=3, alpha_output=2
    )
    m = 1 if parameterization == "sp" else 4
    assert (plan["2.weight"].rho, plan["2.weight"].lr_factor) == (0.5, 1 / m)
    assert (plan.input_scale, plan.output_scale) == ((1, 1) if m == 1 else (3, 0.5))


def test_what_is_excluded_stays_dense() -> None:
    plan = SuParPlan.from_model(
        Residual(),
        base_width=8,
        density=0.25,
        exclude=("blocks.0", "*.2.weight"),
        overrides={"blocks.1.0": {"density": 0.5}},
    )
    assert plan.sparse == ["blocks.1.0.weight", "blocks.2.0.weight"]
    assert [plan[name].rho for name in plan.sparse] == [0.5, 0.25]


def test_what_is_told_wins() -> None:
    overrides = {"pool": {"role": "output", "lr_factor": 3.0}, "outward.weight": {"init_std": 0.5}}
    plan = SuParPlan.from_model(Residual(), base_width=8, overrides=overrides)
    assert (plan["pool.weight"].role, plan["pool.weight"].lr_factor) == ("output", 3)
    assert plan["outward.weight"].init_std == 0.5
    assert "as told" in plan["pool.weight"].why


def test_the_density_is_that_of_the_mask() -> None:
    for masks in (
        Masks("bernoulli", 0.3),
        Masks("random", 0.3),
        Masks("nm"),
        Masks("block", 0.3, block=4),
        Masks("er", 0.3),
    ):
        plan = SuParPlan.from_model(Residual(), base_width=8, masks=masks)
        for name in plan.sparse:
            mask = plan.mask(name)
            assert tuple(mask.shape) == plan[name].shape
            assert int(mask.sum()) / mask.numel() == plan[name].rho


def test_masks_of_a_file(tmp_path: Any) -> None:
    mask = torch.arange(32 * 32).view(32, 32) % 3 == 0
    torch.save({"2.weight": mask}, tmp_path / "m.pt")
    plan = SuParPlan.from_model(perceptron(), base_width=8, masks=Masks("file", path=str(tmp_path / "m.pt")))
    assert plan["2.weight"].rho == int(mask.sum()) / 1024
    assert torch.equal(plan.mask("2.weight"), mask)
    torch.save({"7.weight": mask}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="has a mask of '7.weight', which the model has not"):
        SuParPlan.from_model(perceptron(), base_width=8, masks=Masks("file", path=str(tmp_path / "m.pt")))


def test_it_survives_json_and_tells_plans_apart() -> None:
    plan = SuParPlan.from_model(perceptron(), base_width=8, density=0.5, seed=1)
    again = SuParPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.digest == plan.digest
    assert SuParPlan.from_model(perceptron(), base_width=8, density=0.5, seed=2).digest != plan.digest


def test_it_is_printed_with_equal_layers_together() -> None:
    text = str(SuParPlan.from_model(Residual(), base_width=8, density=0.25))
    assert "blocks.*.0.weight (3)" in text
    assert "m_d·ρ = 4·0.25" in text
    assert "inward.weight" in text


def test_few_weights_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="an output of '2.weight' is the sum of 4.0 weights"):
        SuParPlan.from_model(perceptron(), base_width=8, density=1 / 8)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.table = nn.Parameter(torch.zeros(3, 8, 8))


def test_a_tensor_without_a_role_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no role is known of 'table' \(3, 8, 8\) of Odd. HINT: overrides="):
        SuParPlan.from_model(Odd(), base_width=8)
    assert (
        SuParPlan.from_model(Odd(), base_width=8, overrides={"table": {"role": "embedding"}})["table"].role
        == "embedding"
    )


def test_experts_in_one_tensor_are_not_guessed() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, vocab_size=20,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    with pytest.raises(ValueError, match="no role is known of .*experts"):
        SuParPlan.from_model(model, base_width=8)


def test_experts_that_are_told_have_the_fan_in_of_one() -> None:
    def config(width: int, inner: int) -> MixtralConfig:
        return MixtralConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=3, vocab_size=50,
        )  # fmt: skip

    told: dict[str, Any] = {"experts": {"role": "hidden", "density": 0.5}, "gate": {"role": "output"}}
    with torch.device("meta"):
        model = MixtralForCausalLM(config(64, 160))
    plan = SuParPlan.from_model(model, base_config=config(16, 32), overrides=told, masks=Masks("block", 1.0, block=8))
    up, down = (plan[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert (up.shape, up.fan_in, up.m_d) == ((3, 320, 64), 64, 4)
    assert (down.shape, down.fan_in, down.m_d) == ((3, 64, 160), 160, 5)
    assert up.rho == down.rho == 0.5
    squares = plan.mask("model.layers.0.mlp.experts.down_proj").view(3, 8, 8, 20, 8).float().mean((2, 4))
    assert ((squares == 0) | (squares == 1)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "expected one of them"),
        ({"base_width": 8, "base_config": perceptron()}, "expected one of them"),
        ({"base_width": 0}, "base_width=0 must be a whole number"),
        ({"base_width": 8.0}, "base_width=8.0 must be a whole number"),
        ({"base_width": 8, "parameterization": "ntk"}, "parameterization='ntk' is not one of sp, mup, supar"),
        ({"base_width": 8, "density": 2}, "density=2 must be above 0"),
        ({"base_width": 8, "kind": "magic"}, "kind='magic'"),
        ({"base_width": 8, "init_std": 0}, "init_std=0 must be a positive number"),
        ({"base_width": 8, "alpha_input": float("inf")}, "alpha_input=inf must be a positive number"),
        ({"base_width": 8, "exclude": ("nothing",)}, "'nothing' matches no tensor of the model, such as 0.weight"),
        ({"base_width": 8, "exclude": "2"}, "exclude='2' must be several patterns"),
        ({"base_width": 8, "overrides": {"9": {"role": "hidden"}}}, "'9' matches no tensor"),
        ({"base_width": 8, "overrides": {"2": {"roll": "hidden"}}}, "has 'roll'; expected some of role"),
        ({"base_width": 8, "overrides": {"2": {"role": "middle"}}}, "role='middle' is not one of"),
        (
            {"base_width": 8, "overrides": {"2.weight": {"density": 1.5}}},
            "a density of 1.5; expected at most 1, of matrices",
        ),
        ({"base_config": GPT2Config()}, "no part of Sequential is built from one"),
        ({"base_config": nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 3))}, "the base model has"),
        ({"base_width": 8, "density": 1e-4}, "keeps none of the 1024 weights of '2.weight'"),
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuParPlan.from_model(perceptron(), **arguments)


def test_granite_has_its_own_multipliers_and_the_same_roles() -> None:
    config = GraniteConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, tie_word_embeddings=True,
    )  # fmt: skip
    plan = SuParPlan.from_model(GraniteForCausalLM(config), base_width=16, density=0.25)
    assert roles(plan)["embedding"] == ["model.embed_tokens.weight"]
    assert len(plan.sparse) == 14
    assert plan.width == 4


class Tied(nn.Module):
    """As nanoGPT ties: the head has the table's weight, and nobody says which module is the head."""

    def __init__(self, is_head_first: bool) -> None:
        super().__init__()
        if is_head_first:
            self.head = nn.Linear(16, 11, bias=False)
        self.table = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        if not is_head_first:
            self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize("is_head_first", [False, True])
def test_a_head_that_is_tied_by_hand(is_head_first: bool) -> None:
    plan = SuParPlan.from_model(Tied(is_head_first), base_width=8)
    name = "head.weight" if is_head_first else "table.weight"
    assert {key: entry.role for key, entry in plan.items() if entry.role != "vector"} == {
        name: "embedding", "blocks.0.0.weight": "hidden", "blocks.1.0.weight": "hidden"
    }  # fmt: skip
    assert plan[name].sgd_lr_factor == 2
    assert plan.width == 2


def test_numbers_in_patterns_are_whole_and_names_say_one() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(12)), nn.Linear(8, 3))
    plan = SuParPlan.from_model(model, base_width=8, density=0.5, exclude=("1.0.weight",))
    assert [name for name in plan if plan[name].role == "hidden" and plan[name].rho == 1] == ["1.0.weight"]
    plan = SuParPlan.from_model(model, base_width=8, density=0.5, exclude=("1?.",))
    assert [name for name in plan if plan[name].role == "hidden" and plan[name].rho == 1] == [
        "10.0.weight", "11.0.weight", "12.0.weight"
    ]  # fmt: skip

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 8))
            self.norm = nn.LayerNorm(8)
            self.down = nn.Linear(8, 8)

    assert (
        SuParPlan.from_model(Bare(), base_width=8, overrides={"w": {"role": "hidden"}})["norm.weight"].role == "vector"
    )


def test_what_a_weight_is_computed_from_is_not_guessed() -> None:
    normed = nn.Sequential(nn.Linear(4, 8), torch.nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="no role is known of '1.weight_g'"):
        SuParPlan.from_model(normed, base_width=4)
    depthwise = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 3, 3))
    with pytest.raises(ValueError, match=r"no role is known of '1.weight' \(8, 1, 3, 3\) of Conv2d"):
        SuParPlan.from_model(depthwise, base_width=4)


def test_a_base_model_inside_of_a_module() -> None:
    class Around(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Residual(64)

    plan = SuParPlan.from_model(Around(), base_config=Residual(32))
    assert {entry.m_d for entry in plan.values() if entry.role == "hidden"} == {2}


def test_one_word_for_one_thing() -> None:
    with pytest.raises(ValueError, match="expected one or the other. HINT: masks has them all"):
        SuParPlan.from_model(perceptron(), base_width=8, density=0.5, masks=Masks("block", 0.5))
    with pytest.raises(ValueError, match="masks of kind='nm' have their own density"):
        SuParPlan.from_model(perceptron(), base_width=8, masks=Masks("nm"), overrides={"2.weight": {"density": 0.25}})
    with pytest.raises(ValueError, match="weight_decay_factor='x' must be a number"):
        SuParPlan.from_model(perceptron(), base_width=8, overrides={"2.weight": {"weight_decay_factor": "x"}})
