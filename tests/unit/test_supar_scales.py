"""The factors of μP in the forward: as if they were in the weights, and as Granite has them in its config."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_paro.algorithms.supar import SuParPlan, scale_forward
from lightning_paro.algorithms.supar.scales import hooks_of

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 30, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).double().eval()


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **options})).double().eval()


def plan_of(model: nn.Module, parameterization: Any = "supar") -> SuParPlan:
    return SuParPlan.from_model(
        model, base_width=8, parameterization=parameterization, alpha_input=3.0, alpha_output=1.5
    )


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS).logits  # type: ignore[no-any-return]


@torch.no_grad()
def _multiply(model: nn.Module, factors: dict[str, float]) -> None:
    for name, factor in factors.items():
        model.get_parameter(name).mul_(factor)


def test_llama_as_if_in_the_weights() -> None:
    model = llama()
    by_hand = copy.deepcopy(model)
    scale_forward(model, plan_of(model))
    queries = {f"model.layers.{layer}.self_attn.q_proj.weight": 8**-0.5 for layer in range(2)}
    _multiply(by_hand, {"model.embed_tokens.weight": 3, "lm_head.weight": 1.5 / 4, **queries})
    torch.testing.assert_close(logits(model), logits(by_hand), rtol=0, atol=1e-12)


def test_gpt2_as_if_in_the_weights() -> None:
    """Positions are multiplied as tokens are."""
    model = gpt2()
    by_hand = copy.deepcopy(model)
    scale_forward(model, plan_of(model))
    _multiply(by_hand, {"transformer.wte.weight": 3, "transformer.wpe.weight": 3, "lm_head.weight": 1.5 / 4})
    with torch.no_grad():
        for layer in range(2):
            attention = by_hand.get_submodule(f"transformer.h.{layer}.attn.c_attn")
            attention.weight[:, :32] *= 8**-0.5  # type: ignore[operator]
            attention.bias[:32] *= 8**-0.5  # type: ignore[operator]
    torch.testing.assert_close(logits(model), logits(by_hand), rtol=0, atol=1e-12)


def test_tied_embeddings_have_a_factor_at_each_end() -> None:
    model = gpt2(tie_word_embeddings=True)
    by_hand = gpt2(tie_word_embeddings=True)
    by_hand.lm_head.weight = nn.Parameter(by_hand.lm_head.weight.detach().clone())  # type: ignore[union-attr]
    scale_forward(model, plan_of(model))
    untied = gpt2()
    untied.load_state_dict(by_hand.state_dict())
    scale_forward(untied, plan_of(untied))
    torch.testing.assert_close(logits(model), logits(untied), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_granite_has_in_its_config_what_llama_has_in_hooks(tied: bool) -> None:
    hooked = llama(tie_word_embeddings=tied)
    granite = GraniteForCausalLM(GraniteConfig(**{**SIZES, "tie_word_embeddings": tied})).double().eval()
    granite.load_state_dict(hooked.state_dict())
    for model in (hooked, granite):
        scale_forward(model, plan_of(model))
    torch.testing.assert_close(logits(granite), logits(hooked), rtol=0, atol=1e-12)
    config = granite.config
    assert (config.embedding_multiplier, config.attention_multiplier) == (3, 1 / 8)
    assert config.logits_scaling == pytest.approx(4 / 1.5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in granite.modules())
    again = GraniteForCausalLM(config).double().eval()  # as it is saved
    again.load_state_dict(granite.state_dict())
    torch.testing.assert_close(logits(again), logits(granite), rtol=0, atol=1e-12)


def test_torchs_own_attention() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(30, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 30)).double()
    by_hand = copy.deepcopy(model)
    scale_forward(model, plan_of(model))
    with torch.no_grad():
        by_hand[0].weight *= 3
        by_hand[2].weight *= 1.5 / 4
        for part in by_hand.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.in_proj_weight[:32] *= 8**-0.5
    for mode in (True, False):
        torch.testing.assert_close(model.train(mode)(TOKENS), by_hand.train(mode)(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_sp_is_left_as_it_is(build: Any) -> None:
    model, plain = build(), build()
    scale_forward(model, plan_of(model, "sp"))
    assert torch.equal(logits(model), logits(plain))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Fused(LlamaForCausalLM):  # type: ignore[misc]
    """Reads the weight of its head, as fused losses do."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.model(input_ids=input_ids).last_hidden_state
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.t()).flatten(0, 1), input_ids.flatten())


def test_a_loss_that_passes_by_the_head_is_refused() -> None:
    model = Fused(LlamaConfig(**SIZES))
    assert model(TOKENS).isfinite()
    scale_forward(model, plan_of(model))
    with pytest.raises(RuntimeError, match="Fused made its output without calling its output layer.* HINT: switch"):
        model(TOKENS)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_one_graph_when_compiled(build: Any) -> None:
    torch._dynamo.reset()
    model = build()
    scale_forward(model, plan_of(model))
    compiled = torch.compile(lambda tokens: model(input_ids=tokens).logits, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(TOKENS), logits(model), rtol=0, atol=1e-12)


def test_a_model_can_be_copied_and_pickled() -> None:
    model = llama()
    scale_forward(model, plan_of(model))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("config", "build", "expected"),
    [
        (MistralConfig, MistralForCausalLM, 1 / 8), (Qwen2Config, Qwen2ForCausalLM, 1 / 8),
        (GPTNeoXConfig, GPTNeoXForCausalLM, 1 / 8), (BertConfig, BertForMaskedLM, 1 / 8),
        (OPTConfig, OPTForCausalLM, 1 / 8), (PhiConfig, PhiForCausalLM, 1 / 8),
    ],
)  # fmt: skip
def test_attention_of_other_families(config: Any, build: Any, expected: float) -> None:
    sizes = {**SIZES, "num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "head_dim": 8}
    model = build(config(**sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        scale_forward(model, plan_of(model))
    found = [m.scaling for m in model.modules() if isinstance(getattr(m, "scaling", None), float)]
    assert found
    assert found == pytest.approx([expected] * len(found))
    assert logits(model).isfinite().all()


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)


def test_attention_that_is_not_known_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), OwnAttention(), nn.Linear(32, 3))
    plan = plan_of(model)
    with pytest.warns(UserWarning, match="OwnAttention .'2'.: does not say how it scales"):
        scale_forward(model, plan)


def _called(model: nn.Module) -> dict[str, float]:
    return {name: hook.factor for name, _, hook in hooks_of(model) if hasattr(hook, "is_called")}


def test_all_tables_that_share_a_weight_are_multiplied() -> None:
    config = T5Config(vocab_size=30, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale_forward(model, plan_of(model))
    found = _called(model)
    assert found == {"shared": 3, "encoder.embed_tokens": 3, "decoder.embed_tokens": 3, "lm_head": 1.5 / 4}
    assert not [name for name in found if "relative" in name]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(32, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(input=x)  # type: ignore[no-any-return]


def test_a_head_that_is_tied_by_hand_is_scaled() -> None:
    model, plain = Tied().double(), Tied().double()
    plain.load_state_dict(model.state_dict())
    scale_forward(model, plan_of(model))
    plain.table.register_forward_hook(lambda module, args, output: 3 * output)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS) * 1.5 / 4, rtol=0, atol=1e-12)


def test_a_model_is_scaled_once() -> None:
    model = gpt2()
    scale_forward(model, plan_of(model))
    with pytest.raises(ValueError, match="is multiplied already, by the plan of another .* HINT: one supar_setup"):
        scale_forward(model, plan_of(model))


class Vision(nn.Module):
    """Positions are a bare parameter, of a module of their own or of that of the blocks."""

    def __init__(self, is_inside: bool) -> None:
        super().__init__()
        self.front = Front()
        self.place = nn.Parameter(torch.randn(1, 7, 32)) if is_inside else None
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(32, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.front(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Front(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.place = nn.Parameter(torch.randn(1, 7, 32))
        self.patch = nn.Linear(30, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.patch(nn.functional.one_hot(tokens, 30).to(self.place.dtype))
        return x + self.place + self.token


def test_bare_parameters_are_multiplied_once_with_what_is_around_them() -> None:
    told: Any = {"*place": {"role": "embedding"}, "token": {"role": "embedding"}}
    model = Vision(False).double()
    expected = model.front(TOKENS) * 3
    scale_forward(model, SuParPlan.from_model(model, base_width=8, alpha_input=3.0, overrides=told))
    torch.testing.assert_close(model.front(TOKENS), expected, rtol=0, atol=1e-12)
    model = Vision(True).double()
    with pytest.raises(ValueError, match="'place' of Vision is a parameter of the module that has the blocks too"):
        scale_forward(model, SuParPlan.from_model(model, base_width=8, alpha_input=3.0, overrides=told))


def test_factors_that_a_family_has_itself_are_told() -> None:
    config = GemmaConfig(**{**SIZES, "head_dim": 8, "tie_word_embeddings": True})
    model = GemmaForCausalLM(config)
    with pytest.warns(UserWarning, match=r"gemma multiplies embeddings by √hidden_size.* HINT: alpha_input=1.5, "):
        scale_forward(model, plan_of(model))


def test_an_encoder_with_padding_in_eval_mode() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = nn.Sequential(nn.Embedding(30, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 30)).eval()
    scale_forward(model, plan_of(model))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[:, 5:] = True
    with torch.no_grad():
        found = model[1](model[0](TOKENS), src_key_padding_mask=padding)
    assert found[:, :5].isfinite().all()
