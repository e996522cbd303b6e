"""Small transformers models, and a module that trains one on text."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


class Text(LightningModule):
    """A small transformers model on a fixed text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def llama(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11, n_embd=8, n_layer=layers, n_head=2, n_positions=8, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)
