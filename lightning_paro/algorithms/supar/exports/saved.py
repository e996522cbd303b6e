"""A model with masks in a folder: weights, masks and plan, from which training or export goes on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.exports.source import inner_of, masks_of, plan_of
from lightning_paro.algorithms.supar.mask_state import SUFFIX
from lightning_paro.algorithms.supar.masks import Masks, check_mask, load_masks
from lightning_paro.algorithms.supar.plan import SuParPlan, difference

__all__ = ["load_masked", "save_masked"]

WEIGHTS, MASKS, PLAN = "model.safetensors", "masks.safetensors", "plan.json"


def save_masked(module: nn.Module, folder: str | Path) -> None:
    """Write weights, masks and plan; the folder is there whole or not at all.

    ``model.safetensors`` has the weights as they are trained, without the factors of the forward and with zeros where
    masked, under the names of the inner model. ``masks.safetensors`` has bool tensors under the plan's names, which
    ``Masks("file", path=...)`` reads. ``plan.json`` is ``plan.to_dict()``.

    Args:
        module: A LightningModule with SuParMixin that was set up, with whole parameters.
        folder: To be made.

    Raises:
        ValueError: If there is no plan, or parameters are not all here.
        FileExistsError: If there is something in the folder.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"there is something in {folder}. HINT: a new folder, or remove it.")
    plan, start = plan_of(module), str(module._supar_prefix)
    masks = {name.removeprefix(start): mask.contiguous() for name, mask, _ in masks_of(module)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    part.mkdir()
    try:
        weights = {name: value.detach().clone().contiguous() for name, value in _weights(module).items()}
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        save_file(masks, part / MASKS)
        (part / PLAN).write_text(json.dumps(plan.to_dict(), indent=1))
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_masked(module: nn.Module, folder: str | Path) -> None:
    """Read what :func:`save_masked` wrote into a module of the same model and plan; masks may be of another seed.

    Args:
        module: A LightningModule with SuParMixin that was set up.
        folder: Where it was saved.

    Raises:
        ValueError: If files are missing or damaged, or are of another model, plan or density; nothing is loaded then.
    """
    folder = Path(folder)
    if lost := [name for name in (WEIGHTS, MASKS, PLAN) if not (folder / name).is_file()]:
        raise ValueError(f"there is no {lost[0]} in {folder}. HINT: the folder that save_masked wrote.")
    plan = plan_of(module)
    saved, weights, masks = _read(folder)
    if told := difference(_bare(saved), _bare(plan)):
        raise ValueError(
            f"the plan in {folder} is another: {told}. HINT: build the module with the width, density and "
            "parameterization of the one that was saved."
        )
    own = _weights(module)
    shapes, expected = (
        {name: (tuple(value.shape), value.is_floating_point()) for name, value in of.items()} for of in (weights, own)
    )
    if shapes != expected:
        name = next(n for n in {**shapes, **expected} if shapes.get(n) != expected.get(n))
        there, here = (
            f"{tuple(of[name].shape)} of {of[name].dtype}" if name in of else "missing" for of in (weights, own)
        )
        raise ValueError(f"'{name}' is {there} in {folder}, and {here} in the model. HINT: build the same model.")
    if masks.keys() != set(plan.sparse):
        raise ValueError(
            f"{folder / MASKS} has masks of {len(masks)} tensors, the plan of {len(plan.sparse)}. HINT: a plan with "
            f"masks=Masks('file', path='{folder / MASKS}')."
        )
    start = inner_of(module)[1]
    for name, mask in masks.items():
        check_mask(name, mask, plan[name].shape, plan[name].rho)
        weight = weights.get(f"{module._supar_prefix}{name}".removeprefix(start))
        if weight is not None and weight[~mask].any():  # None: a parameter that torch computes from others
            raise ValueError(f"'{name}' in {folder / WEIGHTS} is not masked as in {MASKS}. HINT: save it once more.")
    module.load_state_dict({f"{module._supar_prefix}{name}{SUFFIX}": m for name, m in masks.items()}, strict=False)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])


def _read(folder: Path) -> tuple[SuParPlan, dict[str, Tensor], dict[str, Tensor]]:
    """Plan, weights and masks."""
    from safetensors.torch import load_file

    try:
        plan = SuParPlan.from_dict(json.loads((folder / PLAN).read_text()))
        return plan, load_file(folder / WEIGHTS), load_masks(folder / MASKS)
    except Exception as error:  # of many kinds, whatever a damaged file leads to
        raise ValueError(
            f"{folder} cannot be read: {type(error).__name__}, {error}. HINT: its files are damaged, or were not "
            "written by save_masked; copy or save them once more."
        ) from error


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the inner model; what is tied once, under its first name."""
    inner, _ = inner_of(module)
    once = {name for name, _ in inner.named_parameters()}
    tied = {name for name, _ in inner.named_parameters(remove_duplicate=False)} - once
    masked = {f"{module._supar_prefix}{name}{SUFFIX}" for name in plan_of(module).sparse}
    state = inner.state_dict()
    return {name: value for name, value in state.items() if name not in tied | masked and isinstance(value, Tensor)}


def _bare(plan: SuParPlan) -> SuParPlan:
    """Without how masks are drawn."""
    return replace(plan, masks=Masks(), entries={name: replace(entry, density=1.0) for name, entry in plan.items()})
