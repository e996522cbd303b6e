"""The model of the paper's experiments: a GPT with ALiBi, SwiGLU and tied embeddings, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT"]


class SelfAttention(nn.Module):
    """Causal attention whose logits fall with the distance (Press et al., "Train short, test long", ALiBi)."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.scaling = head_dim, head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, attn_mask=bias, scale=self.scaling)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """An inner width of 8/3, as many weights as 4 with GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = round(width * 8 / 3 / 16) * 16
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and feed-forward on a residual stream, each behind a norm."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = SelfAttention(width, head_dim)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), bias)
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Logits of the next byte, shape ``(batch, length, 256)``.

    Args:
        width: Of the residual stream, a multiple of the head's.
        layers: Blocks.
        head_dim: Width of an attention head.
    """

    def __init__(self, width: int, layers: int, head_dim: int) -> None:
        super().__init__()
        self.heads = width // head_dim
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, head_dim) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        """As transformers' models say which module makes the logits."""
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        bias = self._bias(tokens.shape[1], x.device)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _bias(self, length: int, device: torch.device) -> Tensor:
        """Added to logits, ``(heads, length, length)``: minus the distance times 2^(-8h/heads), and never ahead."""
        slopes = 2 ** (-8 * torch.arange(1, self.heads + 1, device=device) / self.heads)
        place = torch.arange(length, device=device)
        distance = place[:, None] - place
        ahead = distance < 0
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else slopes.dtype
        return (-slopes[:, None, None] * distance).masked_fill(ahead, -torch.inf).to(dtype)
