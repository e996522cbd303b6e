"""A Llama with μP's factors as a Granite, which has them in its config: the weights stay, and stay tied."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lightning_paro.algorithms.supar.scales import Multiplied, MultipliedInput, hooks_of

__all__ = ["as_granite"]

NOT_OF_GRANITE = ("model_type", "architectures", "pretraining_tp", "transformers_version")


def as_granite(model: Any) -> nn.Module:
    """The GraniteForCausalLM that computes what a LlamaForCausalLM with hooks does; it takes the parameters over.

    Args:
        model: A LlamaForCausalLM as :func:`~lightning_paro.algorithms.supar.scale_forward` left it, or a Granite, which
            is returned as it is.

    Raises:
        ValueError: If it is another model, or factors are elsewhere than Granite has them.
    """
    from transformers import GraniteConfig, GraniteForCausalLM, LlamaForCausalLM

    if type(model) is GraniteForCausalLM:
        return model
    if type(model) is not LlamaForCausalLM:
        raise ValueError(f"a {type(model).__name__} is no Granite; expected a LlamaForCausalLM. HINT: to='dense'.")
    factors = {}
    for kind, expected in ((Multiplied, model.model.embed_tokens), (MultipliedInput, model.lm_head)):
        found = [(name, module, hook.factor) for name, module, hook in hooks_of(model) if isinstance(hook, kind)]
        if other := next((name for name, module, _ in found if module is not expected), None):
            raise ValueError(f"'{other}' is multiplied, which Granite has no factor for. HINT: to='dense'.")
        factors[kind] = math.prod(factor for *_, factor in found)
    scales = {layer.self_attn.scaling for layer in model.model.layers}
    if len(scales) > 1:
        raise ValueError(f"layers have {len(scales)} scales of attention, and Granite one. HINT: to='dense'.")
    config = GraniteConfig(
        **{key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_GRANITE},
        embedding_multiplier=factors[Multiplied],
        logits_scaling=1 / factors[MultipliedInput],
        attention_multiplier=scales.pop(),
        residual_multiplier=1.0,
    )
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        granite = GraniteForCausalLM(config)
    granite.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():  # those of positions, which no state dict has
        owner, _, own = name.rpartition(".")
        setattr(granite.get_submodule(owner), own, buffer)
    granite.tie_weights()
    for name, parameter in granite.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    granite.generation_config = model.generation_config
    granite.train(False)
    return granite
