"""The forward factors of μP, folded into weights: what hooks and attention multiply by, the weights then have in them.

Folding is exact up to rounding. What cannot be folded is refused, not left out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.attention import MultipliedQuery, head_dim_of
from lightning_paro.algorithms.supar.plan import SuParPlan
from lightning_paro.algorithms.supar.roles import is_transposed
from lightning_paro.algorithms.supar.scales import Multiplied, MultipliedInput, hooks_of, is_scale

__all__ = ["fold", "is_linear"]

PARTS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "query", "key", "value", "dense", "c_attn", "q_attn", "c_proj",
    "query_key_value", "qkv_proj", "q_norm", "k_norm", "q_layernorm", "k_layernorm", "rotary_emb",
)  # fmt: skip
"""Children of attention modules whose effect on the query is known."""


@dataclass(frozen=True)
class Edit:
    """A parameter that is to be multiplied, or a part of it; or what an offset makes of it."""

    module: nn.Module
    name: str
    factor: float
    part: Callable[[Tensor], Tensor] = lambda parameter: parameter
    offset: float = 0.0

    def apply(self) -> None:
        part = self.part(self.module.get_parameter(self.name))
        part.add_(self.offset).mul_(self.factor).sub_(self.offset)


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies its input with a weight of two dimensions, and does nothing else but add a bias."""
    return type(module) is nn.Linear or is_transposed(module)


@torch.no_grad()
def fold(model: nn.Module, plan: SuParPlan) -> None:
    """Multiply weights by the factors of the forward, and take hooks away. Weights with two uses become two.

    Args:
        model: To be changed; as :func:`~lightning_paro.algorithms.supar.scale_forward` left it.
        plan: Of which parameterization.

    Raises:
        ValueError: If a factor cannot be folded exactly.
    """
    edits = [edit for name, module, hook in hooks_of(model) for edit in _of_hook(name, module, hook)]
    attention = [] if plan.is_sp else list(_attention(model))
    edits += {(e.module, e.name): e for name, part, factor in attention for e in _of_query(name, part, factor)}.values()
    edits = [edit for edit in edits if edit.factor != 1]
    for edit in edits:
        if edit.module._parameters.get(edit.name) is None:
            raise ValueError(
                f"'{edit.name}' of {type(edit.module).__name__} is no parameter but computed, so nothing can be folded "
                "into it. HINT: torch.nn.utils.parametrize.remove_parametrizations."
            )
    _untie(model, edits)
    for edit in edits:
        edit.apply()
    for _, part, factor in attention:
        part.scaling = float(part.scaling) / factor  # type: ignore[arg-type, assignment]
    for _, module, _ in list(hooks_of(model)):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if is_scale(hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _of_hook(name: str, module: Any, hook: Any) -> list[Edit]:
    if isinstance(hook, MultipliedQuery):
        if module.in_proj_weight is None:
            return [Edit(module, "q_proj_weight", hook.factor)]
        return [Edit(module, "in_proj_weight", hook.factor, lambda weight: weight[: module.embed_dim])]
    if not isinstance(hook, (Multiplied, MultipliedInput)):
        return []
    is_table = isinstance(module, nn.Embedding) and module.max_norm is None
    is_matrix = is_linear(module) or isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    known = {own for own, _ in module.named_parameters()} <= {"weight", "bias"}
    if not (known and (is_matrix or is_table and isinstance(hook, Multiplied))):
        raise ValueError(
            f"'{name}' ({type(module).__name__}) is multiplied by {hook.factor:.6g}, which cannot be folded into it; "
            "expected an nn.Embedding without max_norm, a linear layer or a convolution. HINT: merge adapters; "
            "else keep the LightningModule, or save_masked."
        )
    names = ("weight", "bias") if isinstance(hook, Multiplied) else ("weight",)  # a factor of the input passes no bias
    return [Edit(module, own, hook.factor) for own in names if getattr(module, own, None) is not None]


# ---- attention ------------------------------------------------------------------------------------------------------


def _attention(model: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Attention whose attribute was changed, and by what; Granite's is what its config says."""
    for name, module in model.named_modules():
        head_dim = head_dim_of(module)
        has_config = hasattr(getattr(module, "config", None), "attention_multiplier")
        if head_dim is not None and not has_config:
            yield name, module, head_dim**-0.5


def _of_query(name: str, module: Any, factor: float) -> list[Edit]:
    """What makes the queries of attention larger or smaller by a factor, and nothing else."""
    children = {own: part for own, part in module.named_children() if not isinstance(part, (nn.Dropout, nn.Identity))}
    unknown = next((own for own in children if own not in PARTS), None)
    why = f"'{unknown}' is not known" if unknown else "it clips queries" if _clips(module) else None
    if why is None:
        norm = next((children[own] for own in ("q_norm", "q_layernorm") if own in children), None)
        if norm is not None:
            if (scaled := _norm(norm, factor)) is not None:
                return scaled
            why = f"{type(norm).__name__} of queries is not scaled by its weight"
        elif (found := _query(module, factor)) is not None:
            return found
    why = why or f"queries are not made as expected, by one of {', '.join(children) or 'no child'}"
    raise ValueError(
        f"'{name}' ({type(module).__name__}) has logits of q·k / d_head, and 1 / √d_head cannot be folded into its "
        f"queries: {why}. HINT: keep the LightningModule, or save_masked."
    )


def _query(module: Any, factor: float) -> list[Edit] | None:
    """Of a projection for queries alone, or of the rows that make them in a fused one."""
    head_dim: Any = head_dim_of(module)
    config = getattr(module, "config", None)
    heads: Any = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", None)
    for own in ("q_proj", "query", "q_attn"):
        part = getattr(module, own, None)
        if isinstance(part, nn.Module) and is_linear(part):
            made = part.weight.shape[int(is_transposed(part))]  # type: ignore[index]
            return _whole(part, factor) if heads and made == heads * head_dim else None
    fused = getattr(module, "c_attn", None)
    if fused is not None and is_transposed(fused) and fused.weight.shape[1] == 3 * fused.weight.shape[0]:
        width = fused.weight.shape[0]
        return _parts(fused, factor, lambda parameter: parameter[..., :width])
    if type(module).__name__ == "GPTNeoXAttention":  # query, key, value of one head after the other
        return _parts(module.query_key_value, factor, lambda p: p.view(-1, 3, head_dim, *p.shape[1:])[:, 0])
    if type(module).__name__ == "Phi3Attention":
        return _parts(module.qkv_proj, factor, lambda parameter: parameter[: heads * head_dim])
    return None


def _whole(module: nn.Module, factor: float) -> list[Edit]:
    return [Edit(module, name, factor) for name, _ in module.named_parameters(recurse=False)]


def _parts(module: nn.Module, factor: float, part: Callable[[Tensor], Tensor]) -> list[Edit] | None:
    edits = [Edit(module, name, factor, part) for name, _ in module.named_parameters(recurse=False)]
    return edits if is_linear(module) else None


def _clips(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "clip_qkv", None) is not None


def _norm(norm: nn.Module, factor: float) -> list[Edit] | None:
    """Of a norm that multiplies with its weight, or as Gemma's do with 1 + weight; which of them is tried out."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    values = torch.arange(3 * weight.numel(), device=weight.device).sin().to(weight.dtype).view(3, *weight.shape)
    for offset in (0.0, 1.0):
        trial = copy.deepcopy(norm)
        edits = [replace(edit, offset=offset if edit.name == "weight" else 0.0) for edit in _whole(trial, factor)]
        for edit in edits:
            edit.apply()
        if torch.allclose(trial(values), norm(values) * factor, rtol=2e-2, atol=1e-6):
            return [replace(edit, module=norm) for edit in edits]
    return None


# ---- tied weights ---------------------------------------------------------------------------------------------------


def _untie(model: nn.Module, edits: list[Edit]) -> None:
    """Give a module that is multiplied its own parameter, where others use it too."""
    edited = {id(edit.module._parameters[edit.name]) for edit in edits}
    uses = _uses(model)
    declared: list[Any] = [part for part in model.modules() if getattr(part, "all_tied_weights_keys", None)]
    for part in declared:  # as transformers does it
        if any(uses[key := id(part.get_parameter(name))] > 1 and key in edited for name in part.all_tied_weights_keys):
            for name in part.all_tied_weights_keys:
                owner, _, own = name.rpartition(".")
                _clone(part.get_submodule(owner), own)
            part.config.tie_word_embeddings = False
    for part in declared:  # a parent's list has its children's
        part.all_tied_weights_keys = part.get_expanded_tied_weights_keys(all_submodels=True)
    uses = _uses(model)
    for edit in edits:
        key = id(edit.module._parameters[edit.name])
        if uses[key] > 1:
            uses[key] -= 1
            _clone(edit.module, edit.name)


def _uses(model: nn.Module) -> Counter[int]:
    """By id of a parameter, how many modules have it."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)


def _clone(module: nn.Module, name: str) -> None:
    parameter = module.get_parameter(name)
    setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
