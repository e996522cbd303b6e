"""Which parameters are layers, embeddings and head in the families of transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from lightning_paro.algorithms.anatomy import dissect
from tests.unit.test_anatomy import anatomy_of, below


class Family(NamedTuple):
    model: str
    config: dict[str, Any]
    stacks: dict[str, int]
    embeddings: str
    head: str = ""
    tied: bool = False


SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 40}
ENCODER = {**SMALL, "intermediate_size": 24}
DECODER = {**ENCODER, "num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 3, "vocab_size": 40}
DISTIL = {"dim": 16, "hidden_dim": 24, "n_heads": 2, "n_layers": 3, "vocab_size": 40}
IMAGE = {**ENCODER, "image_size": 8, "patch_size": 4}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 3, "num_decoder_layers": 2, "vocab_size": 40}
BART = {"d_model": 16, "vocab_size": 40, "encoder_layers": 3, "decoder_layers": 2}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
JAMBA = {**DECODER, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 2}
TWO_SIDES = {"model.encoder.layers": 3, "model.decoder.layers": 2}
LM = ({"model.layers": 3}, "model.embed_tokens", "lm_head")
TIED_LM = ({"model.layers": 3}, "model.embed_tokens", "", True)
BERT = "bert.embeddings.word_embeddings bert.embeddings.position_embeddings bert.embeddings.token_type_embeddings"
DISTIL_STACK = {"distilbert.transformer.layer": 3}
DISTILBERT = "distilbert.embeddings.word_embeddings distilbert.embeddings.position_embeddings"
CLIP = "text_model.embeddings vision_model.embeddings.patch_embedding vision_model.embeddings.position_embedding"

FAMILIES = [
    Family("LlamaForCausalLM", DECODER, *LM),
    Family("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}, *TIED_LM),
    Family("LlamaForSequenceClassification", DECODER, {"model.layers": 3}, "model.embed_tokens", "score"),
    Family("LlamaModel", DECODER, {"layers": 3}, "embed_tokens"),
    Family("MistralForCausalLM", DECODER, *LM),
    Family("Qwen2ForCausalLM", DECODER, *LM),
    Family("Qwen3ForCausalLM", DECODER, *LM),
    Family("GemmaForCausalLM", DECODER, *TIED_LM),
    Family("Gemma2ForCausalLM", DECODER, *TIED_LM),
    Family("PhiForCausalLM", DECODER, *LM),
    Family("Phi3ForCausalLM", {**DECODER, "pad_token_id": 0}, *LM),
    Family("MixtralForCausalLM", {**DECODER, "num_local_experts": 2}, *LM),
    Family("JambaForCausalLM", JAMBA, *LM),  # layers of two classes
    Family("GPT2LMHeadModel", GPT2, {"transformer.h": 3}, "transformer.wte transformer.wpe", tied=True),
    Family("GPTNeoXForCausalLM", ENCODER, {"gpt_neox.layers": 3}, "gpt_neox.embed_in", "lm_head"),
    Family(
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16},
        {"model.decoder.layers": 3},
        "model.decoder.embed_tokens model.decoder.embed_positions",
        tied=True,
    ),
    Family(
        "BloomForCausalLM",
        {"hidden_size": 16, "n_head": 2, "n_layer": 3, "vocab_size": 40},
        {"transformer.h": 3},
        "transformer.word_embeddings",
        tied=True,
    ),
    Family("FalconForCausalLM", SMALL, {"transformer.h": 3}, "transformer.word_embeddings", tied=True),
    Family("T5ForConditionalGeneration", T5, {"encoder.block": 3, "decoder.block": 2}, "shared", tied=True),
    Family(
        "BartForConditionalGeneration",
        BART,
        TWO_SIDES,
        "model.shared model.encoder.embed_positions model.decoder.embed_positions",
        tied=True,
    ),
    Family(
        "WhisperForConditionalGeneration",
        {**BART, "pad_token_id": 0},
        TWO_SIDES,
        "model.encoder.conv1 model.decoder.embed_tokens model.decoder.embed_positions",
        tied=True,
    ),
    Family(  # as distilled: the decoder holds a tenth of it
        "WhisperForConditionalGeneration",
        {**BART, "encoder_layers": 12, "decoder_layers": 1, "pad_token_id": 0, "max_target_positions": 8},
        {"model.encoder.layers": 12, "model.decoder.layers": 1},
        "model.encoder.conv1 model.decoder.embed_tokens model.decoder.embed_positions",
        tied=True,
    ),
    Family("BertForMaskedLM", ENCODER, {"bert.encoder.layer": 3}, BERT, "cls.predictions.bias", True),
    Family("BertForSequenceClassification", ENCODER, {"bert.encoder.layer": 3}, BERT, "bert.pooler classifier"),
    Family("BertForTokenClassification", ENCODER, {"bert.encoder.layer": 3}, BERT, "classifier"),
    Family("BertForQuestionAnswering", ENCODER, {"bert.encoder.layer": 3}, BERT, "qa_outputs"),
    Family("DistilBertForMaskedLM", DISTIL, DISTIL_STACK, DISTILBERT, "vocab_projector.bias", True),
    Family(
        "DistilBertForSequenceClassification",
        DISTIL,
        DISTIL_STACK,
        DISTILBERT,
        "pre_classifier classifier",
    ),
    Family("ViTForImageClassification", IMAGE, {"vit.layers": 3}, "vit.embeddings.patch_embeddings", "classifier"),
    Family(
        "CLIPModel",
        {"text_config": ENCODER, "vision_config": IMAGE},
        {"text_model.encoder.layers": 3, "vision_model.encoder.layers": 3},
        CLIP,
        "visual_projection text_projection",
    ),
]


def build(model: str, config: dict[str, Any]) -> nn.Module:
    """A transformers model without memory."""
    of = getattr(transformers, model)
    with torch.device("meta"):
        return of(of.config_class(**config))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model)
def test_every_family(family: Family) -> None:
    model = build(family.model, family.config)
    found = anatomy_of(model)
    layers = [f"{stack}.{index}" for stack, count in family.stacks.items() for index in range(count)]
    assert list(found.layers) == layers
    assert all(set(own) == below(model, layer) for layer, own in found.layers.items())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert set(found.embeddings) == below(model, family.embeddings) - frozen
    assert set(found.head) == below(model, family.head) - frozen
    assert found.tied == family.tied


def test_a_model_whose_layers_are_one_is_refused_with_the_reason() -> None:
    small = {**ENCODER, "embedding_size": 8}
    with pytest.raises(ValueError, match="AlbertForMaskedLM has no list of the 3 layers .* share .* HINT: train all"):
        dissect(build("AlbertForMaskedLM", small))
    several = build("AlbertForMaskedLM", {**small, "num_hidden_groups": 3})
    assert len(anatomy_of(several).layers) == 3
