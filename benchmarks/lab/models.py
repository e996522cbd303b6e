"""What is trained: models of public shapes with random weights, and tokens made up for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Shape", "block_numel", "build", "loss_of", "stack_of", "tokens"]


@dataclass(frozen=True)
class Shape:
    """A model and the work of one micro-batch.

    Attributes:
        family: ``"gpt2"`` or ``"llama"``.
        length: Tokens of a sequence.
        micro_batch: Sequences of a rank's micro-batch.
        config: Arguments of the transformers configuration.
    """

    family: str
    length: int
    micro_batch: int
    config: dict[str, Any] = field(hash=False)


def _gpt2(width: int, layers: int, heads: int, length: int = 512, micro_batch: int = 4, vocab: int = 50257) -> Shape:
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": vocab}
    return Shape("gpt2", length, micro_batch, config | {"bos_token_id": 0, "eos_token_id": 0})


def _llama(
    width: int, layers: int, heads: int, kv: int, inner: int, length: int, vocab: int, micro_batch: int = 1
) -> Shape:
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": vocab}
    return Shape("llama", length, micro_batch, config | {"max_position_embeddings": length})


MODELS = {
    "gpt2-small": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "llama-1b": _llama(2048, 16, 32, 8, 8192, length=2048, vocab=32000, micro_batch=4),
    "llama-1b-mb8": _llama(2048, 16, 32, 8, 8192, length=2048, vocab=32000, micro_batch=8),
    "tiny-gpt2": _gpt2(64, 4, 2, length=16, micro_batch=1, vocab=64),
    "tiny-llama": _llama(64, 4, 4, 2, 128, length=16, vocab=64),
    "cpu-gpt2-small": _gpt2(64, 4, 4, length=16, micro_batch=1, vocab=256),
    "cpu-gpt2": _gpt2(128, 4, 4, length=16, micro_batch=1, vocab=256),
    "cpu-gpt2-medium": _gpt2(128, 24, 4, length=16, micro_batch=1, vocab=6400),  # embeddings are as large a part of it
    "cpu-gpt2-large": _gpt2(256, 4, 4, length=16, micro_batch=1, vocab=256),
}


def build(name: str, device: torch.device) -> nn.Module:
    """The model in fp32, the same on every rank, without dropout and with torch's own attention."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = MODELS[name]
    model: Any
    torch.manual_seed(0)
    with torch.device(device):
        if shape.family == "gpt2":
            dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = GPT2LMHeadModel(GPT2Config(**shape.config, **dropout, use_cache=False))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape.config, tie_word_embeddings=False, use_cache=False))
    assert model.config._attn_implementation == "sdpa", model.config._attn_implementation
    module: nn.Module = model.float().train()
    return module


def stack_of(model: Any) -> tuple[nn.Module, str]:
    """Whose attribute the list of blocks is, and its name."""
    return (model.transformer, "h") if hasattr(model, "transformer") else (model.model, "layers")


def block_numel(model: nn.Module) -> int:
    """Number of parameters of a block."""
    parent, name = stack_of(model)
    return sum(parameter.numel() for parameter in getattr(parent, name)[0].parameters())


def tokens(name: str, rank: int, accumulate: int, device: torch.device) -> list[Tensor]:
    """The micro-batches of a rank, the same in every step: so the loss falls, and wrong training is seen in it."""
    shape = MODELS[name]
    generator = torch.Generator().manual_seed(1000 + rank)
    size = (accumulate, shape.micro_batch, shape.length)
    return list(torch.randint(shape.config["vocab_size"], size, generator=generator).to(device))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Cross entropy of the next token, mean over a micro-batch, in fp32."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss
