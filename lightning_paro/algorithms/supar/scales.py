"""The forward factors of μP in a model that does not know of them: of embeddings, of logits, and of attention.

A transformers model that has them in its config (Granite) gets them there; any other gets hooks, which multiply what
embeddings put out and what the output layer takes in. Attention takes 1 / d_head instead of 1 / √d_head.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from lightning_paro.algorithms.supar.plan import SuParPlan
from lightning_paro.algorithms.supar.rules import Role
from lightning_paro.sharding import embeddings_of, repeated_blocks

__all__ = ["head_dim_of", "scale_forward"]


def scale_forward(model: nn.Module, plan: SuParPlan, prefix: str = "") -> None:
    """Put the plan's factors into a model's forward, once.

    Args:
        model: The model; its parameters are not touched.
        plan: Of which parameterization, and by how much.
        prefix: What stands in front of the plan's names in the model's.
    """
    if plan.is_sp:
        return
    granite = [module for module in model.modules() if hasattr(getattr(module, "config", None), "logits_scaling")]
    _scale_attention(model)
    if granite:
        _configure(granite, plan)
        return
    inside = {part for block in repeated_blocks(model).values() for part in block.modules()}  # such as T5's distances
    for module in _modules(model, plan, prefix, "embedding"):
        if plan.input_scale != 1 and module not in inside:
            module.register_forward_hook(Multiplied(plan.input_scale))
    tied = [head for head in embeddings_of(model, "output") if isinstance(head, nn.Module)]
    for head in dict.fromkeys([*_modules(model, plan, prefix, "output"), *tied]):
        seen = Seen()
        head.register_forward_pre_hook(MultipliedInput(plan.output_scale, seen))
        for owner in model.modules():
            if hasattr(owner, "get_output_embeddings") and head in embeddings_of(owner, "output"):
                owner.register_forward_pre_hook(seen.begin)
                owner.register_forward_hook(seen.end)


def _modules(model: nn.Module, plan: SuParPlan, prefix: str, role: Role) -> list[nn.Module]:
    """The modules of the matrices of a role; that of a tied head is not among the embeddings."""
    names = [name.rpartition(".")[0] for name, entry in plan.items() if entry.role == role]
    return [model.get_submodule(f"{prefix}{name}".rstrip(".")) for name in names]


class Multiplied:
    """Multiplies what a module puts out."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self.factor


class Seen:
    """Whether the output layer was called: a fused loss that reads its weight alone would lose the factor."""

    def __init__(self) -> None:
        self.is_called = False

    def begin(self, module: nn.Module, args: Any) -> None:
        self.is_called = False

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_called:
            raise RuntimeError(
                f"{type(module).__name__} made its output without calling its output layer, as fused losses do, so the "
                "logits were not multiplied by α_output / m_d. HINT: switch the fused loss off, for example "
                "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)."
            )


class MultipliedInput:
    """Multiplies what a module takes in."""

    def __init__(self, factor: float, seen: Seen) -> None:
        self.factor, self.seen = factor, seen

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.seen.is_called = True
        return (args[0] * self.factor, *args[1:])


class MultipliedQuery:
    """Multiplies the query of nn.MultiheadAttention; its bias is left, so it is not to be large."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        return args, {**kwargs, "query": kwargs["query"] * self.factor}


def _scale_attention(model: nn.Module) -> None:
    """1 / d_head in place of 1 / √d_head."""
    for name, module in model.named_modules():
        head_dim = head_dim_of(module)
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(MultipliedQuery(module.head_dim**-0.5), with_kwargs=True)
        elif head_dim is not None:
            is_granite = hasattr(getattr(module, "config", None), "attention_multiplier")
            module.scaling = 1 / head_dim if is_granite else float(module.scaling) * head_dim**-0.5
        elif type(module).__name__.endswith("Attention") and not any(map(_is_known, module.modules())):
            warnings.warn(
                f"'{name}' ({type(module).__name__}) does not say how it scales attention logits, so they are left as "
                "they are. HINT: divide them by d_head instead of √d_head there.",
                stacklevel=3,
            )


def head_dim_of(module: nn.Module) -> int | None:
    """Of attention of transformers that has its factor in an attribute."""
    names = ("head_dim", "head_size", "attention_head_size")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
    return sizes[0] if sizes and isinstance(getattr(module, "scaling", None), float) else None


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or head_dim_of(module) is not None


def _configure(modules: list[nn.Module], plan: SuParPlan) -> None:
    """Granite has all of them in its config; modules read some of it when they are made."""
    for module in modules:
        config: Any = module.config
        config.embedding_multiplier = plan.input_scale
        config.logits_scaling = 1 / plan.output_scale
        if hasattr(module, "embedding_multiplier"):
            module.embedding_multiplier = plan.input_scale  # type: ignore[assignment]
        if isinstance(head_dim := getattr(module, "head_dim", None), int):
            config.attention_multiplier = 1 / head_dim
