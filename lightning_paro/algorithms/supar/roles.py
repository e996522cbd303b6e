"""What every tensor of a model is: an embedding, a hidden matrix, an output, or a vector; and which may be sparse."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_paro.algorithms.supar.rules import Role
from lightning_paro.sharding import embeddings_of, repeated_blocks

__all__ = [
    "TABLES", "TensorRole", "Tensors", "find_roles", "is_projection", "is_transposed", "matches", "table_weights",
    "width_of", "without_role",
]  # fmt: skip

TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Whose rows are looked up."""


@dataclass(frozen=True)
class TensorRole:
    """A tensor's place in a model.

    Attributes:
        role: What it is.
        shape: Its shape.
        axis: The dimension that is summed over: 1 of nn.Linear and, with those after it, of a convolution; 0 of
            transformers' Conv1D, of a table and of a transposed convolution; of a stack of matrices, such as those of
            experts, the last, or -2 where they are kept transposed.
        is_sparse: Whether it is a projection inside a block, which may be made sparse.
        why: How it was recognised.
    """

    role: Role
    shape: tuple[int, ...]
    axis: int
    is_sparse: bool
    why: str

    @property
    def fan_in(self) -> int:
        """Numbers that an output is the sum of."""
        if len(self.shape) < 2:
            return 1
        return math.prod(self.shape[self.axis :]) if self.axis > 0 else self.shape[self.axis]

    @property
    def width_in(self) -> int:
        """Of what comes in; other than fan-in it does not count the places of a convolution's kernel."""
        return self.shape[self.axis] if len(self.shape) > 1 else 1

    @property
    def fan_out(self) -> int:
        """Numbers that come out."""
        return math.prod(self.shape) // self.fan_in


Tensors = Mapping[str, TensorRole]
"""By parameter name; what is tied stands there once."""


def find_roles(model: nn.Module, told: Mapping[str, Role]) -> dict[str, TensorRole]:
    """Tell the role of every parameter, in the order of the model.

    Embeddings and output are those that a transformers model names. Else every nn.Embedding is an embedding, a
    projection before the first repeated block reads the input, and the last one after makes the output. A model without
    blocks is taken for a perceptron: its first projection reads the input, its last one makes the output.

    Args:
        model: May be on the meta device.
        told: Roles by pattern, as of :func:`matches`; they win.

    Raises:
        ValueError: If there is no role for a tensor of two or more dimensions, or of a projection before the blocks it
            cannot be said whether it reads the input or makes the output, as there is none behind them.
    """
    found, lost = _find(model, told)
    if lost:
        more = f" and {len(lost) - 2} more" if len(lost) > 2 else ""
        some = ", ".join(f"'{name}' {found[name].shape} of {kind}" for name, kind in list(lost.items())[:2])
        raise ValueError(
            f"no role is known of {some}{more}. HINT: overrides={{'{next(iter(lost))}': {{'role': 'hidden'}}}} if it "
            "maps width to width, 'embedding' if it is added to the input or makes it, else 'output' or 'vector'; a "
            "pattern such as '*experts*' says it of several."
        )
    return found


def without_role(model: nn.Module) -> list[str]:
    """Names of the tensors that :func:`find_roles` would have to be told of."""
    return list(_find(model, {})[1])


def _find(model: nn.Module, told: Mapping[str, Role]) -> tuple[dict[str, TensorRole], dict[str, str]]:
    """The roles, and of tensors without one the class of their module."""
    names = {name for name, _ in model.named_parameters()}
    given = {
        id(parameter): next((role for pattern, role in told.items() if matches(name, pattern, names)), None)
        for name, parameter in model.named_parameters()
    }
    places = _places(model, given)
    tables = table_weights(model)
    found: dict[str, TensorRole] = {}
    lost: dict[str, str] = {}
    seen: set[int] = set()  # what is tied stands under its first name
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            role, is_sparse, why = places.get(id(parameter), ("vector", False, ""))
            if (as_told := given[id(parameter)]) is not None:
                role, is_sparse, why = as_told, is_sparse and as_told == "hidden", "as told"
            elif id(parameter) not in places and not _is_vector(module, name, parameter):
                lost[name] = type(module).__name__
            axis = 0 if id(parameter) in tables else _axis(module, parameter, role)
            found[name] = TensorRole(role, tuple(parameter.shape), axis, is_sparse, why)
    return found, lost


def table_weights(model: nn.Module) -> set[int]:
    """Ids of the weights of all tables."""
    return {id(module.weight) for module in model.modules() if isinstance(module, TABLES)}


def matches(name: str, pattern: str, names: Container[str] = ()) -> bool:
    """Whether a pattern, with ``*`` and ``?`` for what is left open, says a name or a part of it.

    A number is a whole one: ``layers.1`` says nothing of ``layers.10``.

    Args:
        name: Of a parameter.
        pattern: One that is a name itself says that one only.
        names: Of all parameters.
    """
    if pattern in names:
        return name == pattern
    start, end = ("(?<!\\d)" * pattern[:1].isdigit(), "(?!\\d)" * pattern[-1:].isdigit())
    inner = re.sub(r"\\[zZ]$", "", fnmatch.translate(pattern))
    return re.search(f"{start}{inner}{end}", name) is not None


def width_of(model: nn.Module, tensors: Tensors) -> int:
    """The width of a model: what its config says, what its output is the sum of, or the most common hidden fan-in.

    Raises:
        ValueError: If it has none of these.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(width := getattr(config, name, None), int):
                return width
    outputs = [tensor.width_in for tensor in tensors.values() if tensor.role == "output"]
    hidden = [tensor.width_in for tensor in tensors.values() if tensor.role == "hidden"]
    inputs = [tensor.fan_out for tensor in tensors.values() if tensor.role == "embedding"]
    if not (widths := outputs or hidden or inputs):
        raise ValueError("the model has no projection, so it has no width. HINT: give base_config instead.")
    width = Counter(widths).most_common(1)[0][0]
    convolved = [t for t in tensors.values() if len(t.shape) > 2 and t.role in ("hidden", "embedding")]
    if outputs and convolved and all(width not in tensor.shape for tensor in convolved):
        raise ValueError(
            f"the output is made of {width} numbers, as many as no convolution has channels (the first has "
            f"{convolved[0].shape[0]}), so the model's width is not known. HINT: base_config=, the base model itself."
        )
    return width


MATRICES = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

Place = tuple[Role, bool, str]


AFTER = ("project_out",)
"""Projections that stand before the blocks in a model, and after them in its forward (OPT)."""


def _places(model: nn.Module, told: Mapping[int, Role | None]) -> dict[int, Place]:
    """By id of every matrix whose role is known: role, whether it may be sparse, and why.

    Args:
        model: Whose.
        told: By id what is known better.
    """
    order = list(model.modules())
    blocks = [block for block in repeated_blocks(model).values() if not is_projection(block)]
    inside = {module for block in blocks for module in block.modules()}
    tables = [*embeddings_of(model, "input"), *(module for module in order if isinstance(module, TABLES))]
    readers = [m for m in order if not (is_projection(m) or any(m.children()))]  # such as a recurrent layer
    has_input = bool(tables) or any(told.get(one) == "embedding" for module in readers for one in _ids(module))
    weights = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    tied = [m for m in order if isinstance(m, nn.Linear) and id(m.weight) in weights]
    heads = embeddings_of(model, "output") or tied
    projections = [module for module in order if is_projection(module) and module not in (*tables, *heads)]
    outside = [module for module in projections if module not in inside]
    first = next((place for place, module in enumerate(order) if module in inside), None)
    later = {module for own, module in model.named_modules() if own.rpartition(".")[2] in AFTER}
    before = [m for m in outside if m not in later and first is not None and order.index(m) < first]
    if not heads and (after := [module for module in outside if module not in before]):
        heads = [after[-1]]
    if tables and not heads:  # they may read the input or make the output
        projections, before = [module for module in projections if module not in before], []
    if not blocks and not has_input and len(outside) > 1:
        before = outside[:1]

    places: dict[int, Place] = {}
    for module in projections:
        within = "of a block" if module in inside else "between first and last" if not blocks else "outside of blocks"
        for matrix in _matrices(module):
            places[id(matrix)] = ("hidden", module in inside or not blocks, f"a projection {within}")
    for module in before:
        places |= {id(matrix): ("embedding", False, "reads the input") for matrix in _matrices(module)}
    for module in heads:
        places |= {id(matrix): ("output", False, "makes the output") for matrix in _matrices(module)}
    for module in tables:
        for matrix in _matrices(module):
            why = "embedding, tied to the output" if places.get(id(matrix), ("",))[0] == "output" else "embedding"
            places[id(matrix)] = ("embedding", False, why)
    return places


def _ids(module: nn.Module) -> list[int]:
    return [id(parameter) for parameter in module.parameters(recurse=False)]


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    """What a module multiplies with; what it is computed from, as by weight_norm, has no known role."""
    return [p for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and name in MATRICES]


def is_projection(module: nn.Module) -> bool:
    """Whether a module multiplies what comes in with a matrix."""
    return isinstance(module, (nn.Linear, nn.MultiheadAttention)) or _is_conv(module) or is_transposed(module)


def _is_conv(module: nn.Module) -> bool:
    """Whether its fan-in grows with the width, which that of a convolution in groups may not."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, whose weight is that of a linear module transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _axis(module: nn.Module, parameter: nn.Parameter, role: Role) -> int:
    is_row = role == "embedding" and not is_projection(module) and not isinstance(module, nn.RNNBase)
    if is_transposed(module) or is_row or isinstance(module, TRANSPOSED):
        return 0
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return 1
    if parameter.ndim > 2 and getattr(module, "is_transposed", False):  # experts of transformers
        return -2
    return max(parameter.ndim - 1, 1)


TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _is_vector(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """One dimension, or as good as one: the biases that nn.MultiheadAttention appends to keys and values."""
    is_appended = isinstance(module, nn.MultiheadAttention) and name.rpartition(".")[2] in ("bias_k", "bias_v")
    return parameter.ndim < 2 or is_appended
