"""A trained model without its LightningModule: an ordinary one that computes the same."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from lightning_paro.algorithms.supar.exports.fold import fold
from lightning_paro.algorithms.supar.exports.granite import as_granite
from lightning_paro.algorithms.supar.exports.semi_structured import check_groups, semi_structured
from lightning_paro.algorithms.supar.exports.source import copied, inner_of, masks_of, plan_of
from lightning_paro.algorithms.supar.exports.sparse_linear import compress

__all__ = ["Format", "export"]

Format = Literal["dense", "granite", "csr", "bsr", "2:4"]


def export(module: nn.Module, to: Format = "dense", rows: int = 4096) -> nn.Module:
    """Copy what was trained into a model without hooks, whose outputs are the same up to rounding.

    Args:
        module: A LightningModule with SuParMixin that was set up, with whole parameters; it is not changed.
        to: What the copy is:

            - ``"dense"``: a model of the same class, with the factors of embeddings, logits and attention in its
              weights. Embeddings that were tied to the output no longer are.
            - ``"granite"``: a Llama becomes a Granite, with the factors in its config and its weights as they are.
            - ``"csr"``, ``"bsr"``: as dense, with masked linear layers compressed, BSR with the blocks of the masks.
            - ``"2:4"``: as dense, with semi-structured weights in those masked linear layers whose shape is
              measured to be faster so, on the CUDA device where the module is. What was measured is in ``timings`` of
              the result.
        rows: For ``"2:4"``, rows of the inputs that are measured: batch size times length.

    Returns:
        The copy, in eval mode: of the child that holds all of the plan's tensors, so of ``self.model`` if they all are
        in there, else of the module.

    Raises:
        ValueError: If there is no plan, parameters are not all here, or the format does not fit the model.
    """
    if to not in get_args(Format):
        raise ValueError(f"to={to!r} is not one of {', '.join(get_args(Format))}.")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows={rows!r} must be a whole number, 1 or more.")
    plan = plan_of(module)
    _, prefix = inner_of(module)
    if to == "bsr" and plan.masks.kind != "block":
        raise ValueError(
            f"masks are of kind {plan.masks.kind!r}; expected 'block', as BSR keeps squares. HINT: to='csr', or train "
            "with masks=Masks('block', block=16)."
        )
    names = []
    for name, mask, axis in masks_of(module):
        names.append(name.removeprefix(prefix))
        if to == "2:4":
            check_groups(name, mask, axis)
    model = copied(module)
    if to == "granite":
        return as_granite(model)
    fold(model, plan)
    if to == "2:4":
        model.timings = semi_structured(model, names, rows)  # type: ignore[assignment]
    elif to != "dense":
        compress(model, names, plan.masks.block if to == "bsr" else None)
    return model
