"""μP's factor of attention logits, 1 / d_head, in torch's attention and in that of transformers."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

__all__ = ["MultipliedQuery", "head_dim_of", "scale_attention"]


class MultipliedQuery:
    """Multiplies the query of nn.MultiheadAttention; its bias is left, so it is not to be large."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As a forward pre-hook."""
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        return args, {**kwargs, "query": kwargs["query"] * self.factor}


def scale_attention(model: nn.Module) -> None:
    """Attention takes 1 / d_head in place of 1 / √d_head; of attention that is not known it warns."""
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        head_dim = head_dim_of(module)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which modules with hooks do not take
        elif isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(MultipliedQuery(module.head_dim**-0.5), with_kwargs=True)
        elif head_dim is not None:
            is_granite = hasattr(getattr(module, "config", None), "attention_multiplier")
            module.scaling = 1 / head_dim if is_granite else float(module.scaling) * head_dim**-0.5
        elif _looks_like_it(module) and not any(map(_is_attention, _below(module))):
            left.setdefault(type(module).__name__, name)
    if left:
        told = ", ".join(f"{kind} ('{name}')" for kind, name in left.items())
        warnings.warn(
            f"{told}: does not say how it scales attention logits, so they are left as they are. HINT: give it an int "
            "head_dim and a float scaling, which forward multiplies q·k with and which becomes 1 / d_head; or see to "
            "it that they are q·k / d_head, times a constant.",
            stacklevel=3,
        )


def head_dim_of(module: nn.Module) -> int | None:
    """Of attention that has its factor in an attribute, as transformers' has."""
    names = ("head_dim", "head_size", "attention_head_size")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
    return sizes[0] if sizes and isinstance(getattr(module, "scaling", None), float) else None


def _below(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[1:]


def _is_attention(module: nn.Module) -> bool:
    """Whether attention is done there, known or not, and not in what is around it."""
    return isinstance(module, nn.MultiheadAttention) or head_dim_of(module) is not None or _looks_like_it(module)


def _looks_like_it(module: nn.Module) -> bool:
    """By its name, or by what its forward calls."""
    calls: Any = getattr(getattr(type(module), "forward", None), "__code__", None)
    is_called = "scaled_dot_product_attention" in getattr(calls, "co_names", ())
    return type(module).__name__.endswith("Attention") or is_called
