"""The forward factors of μP in a model that does not know of them: of embeddings, of logits, and of attention.

A transformers model that has them in its config (Granite) gets them there; any other gets hooks, which multiply what
embeddings put out and what the output layer takes in. Attention takes 1 / d_head instead of 1 / √d_head.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_paro.algorithms.supar.attention import MultipliedQuery, scale_attention
from lightning_paro.algorithms.supar.plan import SuParPlan
from lightning_paro.algorithms.supar.roles import TABLES, is_projection, table_weights
from lightning_paro.algorithms.supar.rules import Role
from lightning_paro.sharding import embeddings_of, repeated_blocks

__all__ = ["Multiplied", "MultipliedInput", "hooks_of", "is_scale", "passed_by", "scale_forward"]


def scale_forward(model: nn.Module, plan: SuParPlan, prefix: str = "") -> None:
    """Put the plan's factors into a model's forward, once.

    Args:
        model: The model; its parameters are not touched.
        plan: Of which parameterization, and by how much.
        prefix: What stands in front of the plan's names in the model's.

    Raises:
        ValueError: If there are factors in it already, or the embeddings' cannot be put in.
    """
    if plan.is_sp:
        return
    if there := next(hooks_of(model), None):
        raise ValueError(
            f"'{there[0]}' is multiplied already, by the plan of another module around it or in it. HINT: one "
            "supar_setup for a model, in one LightningModule; build a new model for another."
        )
    granite = [module for module in model.modules() if hasattr(getattr(module, "config", None), "logits_scaling")]
    scale_attention(model)
    if granite:
        _configure(granite, plan)
        return
    _warn_of_own_factors(model, plan)
    heads = _heads(model, plan, prefix)
    if not heads and plan.output_scale != 1:
        warnings.warn(
            f"no module of {type(model).__name__} is known to make the output, so nothing is multiplied by α_output / "
            f"m_d = {plan.output_scale:.4g}. HINT: if its forward reads the weight of the embedding, call a module "
            "instead, head = nn.Linear(width, words, bias=False) with head.weight = embedding.weight; if the output is "
            "not of the model, leave this aside.",
            stacklevel=3,
        )
    if plan.input_scale != 1:
        for module in _inputs(model, plan, prefix, heads):
            module.register_forward_hook(Multiplied(plan.input_scale))
    for head in heads:
        scale = MultipliedInput(plan.output_scale)
        head.register_forward_pre_hook(scale, with_kwargs=True)
        for owner in model.modules():
            if hasattr(owner, "get_output_embeddings") and head in embeddings_of(owner, "output"):
                seen = Seen(scale)
                owner.register_forward_pre_hook(seen.begin)
                owner.register_forward_hook(seen.end)


def hooks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """The hooks that scale a forward, with the name of their module and itself."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if is_scale(hook):
                yield name, module, hook


def is_scale(hook: Any) -> bool:
    """Whether a hook is one of those that :func:`scale_forward` registers."""
    return isinstance(getattr(hook, "__self__", hook), (Multiplied, MultipliedInput, MultipliedQuery, Seen))


def passed_by(model: nn.Module) -> list[str]:
    """Names of the modules whose factor was never used, since nobody has called them yet."""
    return [name for name, _, hook in hooks_of(model) if getattr(hook, "is_called", None) is False]


# ---- embeddings and output ------------------------------------------------------------------------------------------


def _owners(model: nn.Module, plan: SuParPlan, prefix: str, role: Role) -> list[nn.Module]:
    """The modules that have a matrix of a role, also those that are tied to it."""
    ids = {id(model.get_parameter(prefix + name)) for name, entry in plan.items() if entry.role == role}
    return [module for module in model.modules() if any(id(p) in ids for p in module._parameters.values())]


def _heads(model: nn.Module, plan: SuParPlan, prefix: str) -> list[nn.Module]:
    """What makes the output: by its role, by its model's word, or by a matrix that it shares with a table."""
    tables = table_weights(model)
    tied = [
        module for module in _owners(model, plan, prefix, "embedding")
        if is_projection(module) and any(id(p) in tables for p in module._parameters.values())
    ]  # fmt: skip
    told = [head for head in embeddings_of(model, "output") if isinstance(head, nn.Module)]
    return list(dict.fromkeys([*_owners(model, plan, prefix, "output"), *told, *tied]))


def _inputs(model: nn.Module, plan: SuParPlan, prefix: str, heads: list[nn.Module]) -> list[nn.Module]:
    """What makes the input of the first block, each once: of modules inside one another the outer one."""
    blocks = set(repeated_blocks(model).values())
    inside = {part for block in blocks for part in block.modules()}  # such as T5's distances
    found = [m for m in _owners(model, plan, prefix, "embedding") if m not in heads and m not in inside]
    for module in found:
        if not isinstance(module, TABLES) and not is_projection(module) and blocks & set(module.modules()):
            names = [name for name, p in module.named_parameters(recurse=False) if p.ndim > 1]
            raise ValueError(
                f"'{names[0]}' of {type(module).__name__} is a parameter of the module that has the blocks too, so "
                f"what it adds to the input cannot be multiplied by α_input = {plan.input_scale:g}. HINT: put it into "
                "an nn.Embedding, or alpha_input=1."
            )
    within = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in within]


class Multiplied:
    """Multiplies what a module puts out."""

    def __init__(self, factor: float) -> None:
        self.factor, self.is_called = factor, False

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """As a forward hook."""
        self.is_called = True
        if not isinstance(output, Tensor):
            raise TypeError(
                f"{type(module).__name__} reads the input and puts out a {type(output).__name__}, which cannot be "
                f"multiplied by α_input = {self.factor:g}. HINT: alpha_input=1, or the role 'hidden' for its weights."
            )
        return output * self.factor


class MultipliedInput:
    """Multiplies what a module takes in."""

    def __init__(self, factor: float) -> None:
        self.factor, self.is_called = factor, False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As a forward pre-hook."""
        self.is_called = True
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: kwargs[name] * self.factor}


class Seen:
    """Whether a forward called the output layer: a fused loss that reads its weight alone would lose the factor."""

    def __init__(self, scale: MultipliedInput) -> None:
        self.scale = scale

    def begin(self, module: nn.Module, args: Any) -> None:
        self.scale.is_called = False

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.scale.is_called:
            raise RuntimeError(
                f"{type(module).__name__} made its output without calling its output layer, as fused losses do, so the "
                "logits were not multiplied by α_output / m_d. HINT: switch the fused loss off, for example "
                "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)."
            )


def _warn_of_own_factors(model: nn.Module, plan: SuParPlan) -> None:
    """Some families have factors of their own that follow the width."""
    root = plan.width**0.5
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        kind = str(getattr(config, "model_type", ""))
        if kind.startswith(("gemma", "recurrent_gemma")):
            told = f"{kind} multiplies embeddings by √hidden_size, so they grow with the width. HINT: "
            told += f"alpha_input={plan.alpha_input / root:.4g}, the present one divided by √m_d."
        elif kind in ("t5", "mt5", "umt5") and getattr(config, "tie_word_embeddings", False):
            told = f"{kind} with tied embeddings divides what the output takes in by √d_model, beside m_d. HINT: "
            told += f"alpha_output={plan.alpha_output * root:.4g}, the present one times √m_d."
        else:
            continue
        if root != 1:
            warnings.warn(told, stacklevel=4)
        return


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
