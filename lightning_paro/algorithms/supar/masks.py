"""Static sparsity masks: which weights are kept, drawn from a seed and the tensor's name alone.

Hence the same on every rank, in whatever order and on whatever device a model is built. Masks are as of Dey et al.,
"Sparse maximal update parameterization": random, unstructured and static, chosen before training; the other kinds have
rows and columns of equal expected density too, but are not in the paper.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KINDS", "Kind", "Masks", "as_rows", "check_mask", "densities", "draw_mask", "generator_of", "load_masks"]

Kind = Literal["random", "bernoulli", "nm", "block", "er", "file"]
KINDS: tuple[Kind, ...] = ("random", "bernoulli", "nm", "block", "er", "file")


@dataclass(frozen=True)
class Masks:
    """How masks are drawn.

    Attributes:
        kind: ``"random"``: exactly ``density`` of each tensor. ``"bernoulli"``: every weight by itself. ``"nm"``: n of
            every m neighbours along the fan-in. ``"block"``: squares of ``block`` x ``block``. ``"er"``: exactly, with
            a density per tensor in proportion to (fan-in + fan-out) / (fan-in * fan-out), as Erdos-Renyi graphs of
            equal degree have it, and ``density`` over all. ``"file"``: from ``path``.
        density: Share of weights that are kept; of ``"nm"`` it follows from n and m.
        n: For ``"nm"``.
        m: For ``"nm"``.
        block: Side of a square, for ``"block"``.
        path: A file of bool tensors by parameter name, safetensors or torch's own, for ``"file"``.
        seed: Of the draws.

    Raises:
        ValueError: If an argument is not understood.
    """

    kind: Kind = "random"
    density: float = 1.0
    n: int = 2
    m: int = 4
    block: int = 16
    path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}.")
        if type(self.density) not in (int, float) or not 0 < self.density <= 1:
            raise ValueError(
                f"density={self.density!r} must be above 0 and at most 1: the share of weights that are kept. HINT: a "
                "sparsity of 0.875 is density=0.125."
            )
        if type(self.seed) is not int:
            raise ValueError(f"seed={self.seed!r} must be a whole number.")
        for name in ("n", "m", "block"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number.")
        object.__setattr__(self, "density", float(self.density))  # 1 and 1.0 are the same plan
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))  # as a checkpoint can have it
        if self.kind == "nm" and not 0 < self.n <= self.m:
            raise ValueError(f"n={self.n}, m={self.m}: expected 0 < n <= m, as in 2:4.")
        if self.kind == "nm" and self.density not in (1, self.n / self.m):
            raise ValueError(
                f"kind='nm' keeps {self.n} of {self.m}, a density of {self.n / self.m:g}, but density={self.density:g}."
                " HINT: leave the density out, or choose n and m by it."
            )
        if self.kind == "block" and self.block < 1:
            raise ValueError(f"block={self.block} must be at least 1, the side of a square of weights.")
        if (self.kind == "file") != (self.path is not None):
            raise ValueError(f"kind={self.kind!r} and path={self.path!r}: a path goes with kind='file', and only then.")

    @property
    def is_dense(self) -> bool:
        """Whether nothing is masked."""
        return self.kind not in ("file", "nm") and self.density == 1


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator of its own for a tensor, from a seed and the tensor's name, compiled or not.

    It is on the host, as all that is drawn with it must be, whatever the default device is: Lightning calls
    ``configure_model`` with the accelerator as default.
    """
    digest = hashlib.sha256(f"{seed}\n{name.replace('_orig_mod.', '')}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw_mask(masks: Masks, name: str, shape: tuple[int, ...], axis: int, density: float) -> Tensor:
    """Draw the mask of a tensor, on the host.

    Args:
        masks: How; of any kind but ``"file"``.
        name: Of the parameter.
        shape: Of the parameter.
        axis: The dimension of fan-in, see :func:`as_rows`.
        density: Of this tensor.

    Returns:
        Bool of that shape, True where a weight is kept.

    Raises:
        ValueError: If the shape does not divide into groups or squares.
    """
    generator = generator_of(masks.seed, name)
    if masks.kind == "bernoulli":
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < density
    if masks.kind in ("random", "er"):
        return _exactly(math.prod(shape), density, generator).view(shape)
    outputs, inputs = as_rows(torch.empty(shape, device="meta"), axis).shape
    rows = (outputs, inputs)
    drawn = (
        _groups(masks, name, rows, generator) if masks.kind == "nm" else _squares(masks, name, rows, density, generator)
    )
    if axis > 0:
        return drawn.view(shape)
    moved = torch.empty(shape, device="meta").movedim(axis, -1).shape
    return drawn.view(moved).movedim(-1, axis).contiguous()


def as_rows(tensor: Tensor, axis: int) -> Tensor:
    """A matrix with a row an output, ``(outputs, fan-in)``.

    Args:
        tensor: Of two or more dimensions.
        axis: The dimension of fan-in: 0 of a matrix that is kept transposed; 1 with all after it, as a convolution has
            it; or of several the last, as in a stack of matrices, or one from behind alone.
    """
    if axis > 0:
        return tensor.flatten(axis).flatten(0, axis - 1)
    return tensor.movedim(axis, -1).flatten(0, -2)


def densities(masks: Masks, shapes: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """The density that is asked of each tensor.

    Args:
        masks: How they are drawn.
        shapes: Fan-in and fan-out by name.
    """
    if masks.kind == "nm":
        return dict.fromkeys(shapes, masks.n / masks.m)
    if masks.kind != "er":
        return dict.fromkeys(shapes, masks.density)
    sizes = {name: fan_in * fan_out for name, (fan_in, fan_out) in shapes.items()}
    raw = {name: (fan_in + fan_out) / (fan_in * fan_out) for name, (fan_in, fan_out) in shapes.items()}
    dense: set[str] = set()
    scale = 0.0
    while len(dense) < len(raw):  # who would come above 1 is dense, and the others share what is left
        kept = masks.density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        scale = kept / sum(raw[name] * sizes[name] for name in raw if name not in dense)
        above = {name for name in raw if name not in dense and scale * raw[name] > 1}
        if not above:
            break
        dense |= above
    return {name: 1.0 if name in dense else scale * share for name, share in raw.items()}


def load_masks(path: str | Path) -> dict[str, Tensor]:
    """Masks from a file, by parameter name; they are mapped into memory, and read when they are looked at.

    Raises:
        ValueError: If the file is not there, or holds something else than bool tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path} of masks. HINT: bool tensors by parameter name, as torch.save does.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: dict[str, Tensor] = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, whatever a damaged file leads to
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}). HINT: torch.save of bool tensors by parameter name, or "
            "safetensors."
        ) from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}; expected bool tensors by parameter name.")
    wrong = [name for name, mask in found.items() if not isinstance(mask, Tensor) or mask.dtype is not torch.bool]
    if wrong:
        raise ValueError(f"'{wrong[0]}' in {path} is no bool tensor; expected masks by parameter name.")
    return found


def check_mask(name: str, mask: Tensor, shape: tuple[int, ...], rho: float | None = None) -> None:
    """Refuse a mask of another shape, one that keeps nothing, or another share of the weights than is told.

    Raises:
        ValueError: If it is one.
    """
    if tuple(mask.shape) != shape:
        raise ValueError(f"the mask of '{name}' has shape {tuple(mask.shape)}, the parameter {shape}.")
    if not mask.any():
        raise ValueError(
            f"the mask of '{name}' {shape} keeps none of its {mask.numel()} weights. HINT: a larger density."
        )
    if rho is not None and (kept := int(mask.count_nonzero()) / mask.numel()) != rho:
        raise ValueError(
            f"the loaded mask of '{name}' keeps {kept:.6g} of the weights, the plan says {rho:.6g}. HINT: make the "
            "plan with the density, kind and seed of the run that was saved."
        )


def _exactly(count: int, density: float, generator: torch.Generator) -> Tensor:
    """Of so many places exactly a share, each set of places as likely as another."""
    kept = round(density * count)
    if kept in (0, count):
        return torch.full((count,), kept > 0, device="cpu")
    drawn = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
    spread = 6 * math.sqrt(density * (1 - density) / count)
    while True:  # the largest number that is kept is near the density, so only those around it have to be sorted
        low, high = density - spread, density + spread
        mask = drawn < low
        near = ((drawn >= low) & (drawn < high)).nonzero().flatten()
        lacking = kept - int(mask.count_nonzero())
        if 0 <= lacking <= len(near):
            break
        spread *= 4
    mask[near[drawn[near].argsort(stable=True)[:lacking]]] = True  # of equal numbers the first
    return mask


def _groups(masks: Masks, name: str, rows: tuple[int, int], generator: torch.Generator) -> Tensor:
    """N of every M neighbours in a row."""
    outputs, inputs = rows
    if inputs % masks.m:
        raise ValueError(f"'{name}' has a fan-in of {inputs}, which does not divide by m={masks.m}. HINT: exclude it.")
    shape = (outputs, inputs // masks.m, masks.m)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
    mask = torch.zeros_like(drawn, dtype=torch.bool)
    return mask.scatter_(2, drawn.topk(masks.n, dim=2).indices, True).view(rows)


def _squares(masks: Masks, name: str, rows: tuple[int, int], density: float, generator: torch.Generator) -> Tensor:
    """Squares that are kept whole."""
    side = masks.block
    if rows[0] % side or rows[1] % side:
        raise ValueError(f"'{name}' has fans of {rows[1]} and {rows[0]}, which do not divide by block={side}.")
    high, wide = rows[0] // side, rows[1] // side
    kept = _exactly(high * wide, density, generator).view(high, wide)
    return kept.repeat_interleave(side, 0).repeat_interleave(side, 1)
