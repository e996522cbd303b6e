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

__all__ = ["TensorRole", "Tensors", "find_roles", "is_projection", "is_transposed", "matches", "width_of"]


@dataclass(frozen=True)
class TensorRole:
    """A tensor's place in a model.

    Attributes:
        role: What it is.
        shape: Its shape.
        axis: The dimension that is summed over: 1 of nn.Linear and, with those after it, of a convolution; 0 of
            transformers' Conv1D and of a table; the last of a stack of matrices, such as those of experts.
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
        return self.shape[0] if self.axis == 0 else math.prod(self.shape[self.axis :])

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
        ValueError: If there is no role for a tensor of two or more dimensions.
    """
    places, names = _places(model), {name for name, _ in model.named_parameters()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[str, TensorRole] = {}
    lost: list[str] = []
    seen: set[int] = set()  # what is tied stands under its first name
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            given = next((role for pattern, role in told.items() if matches(name, pattern, names)), None)
            role, is_sparse, why = places.get(id(parameter), ("vector", False, ""))
            if given is not None:
                role, is_sparse, why = given, is_sparse and given == "hidden", "as told"
            elif id(parameter) not in places and not _is_vector(module, name, parameter):
                lost.append(f"'{name}' {tuple(parameter.shape)} of {type(module).__name__}")
            found[name] = TensorRole(role, tuple(parameter.shape), _axis(module, parameter, tables), is_sparse, why)
    if lost:
        more = f" and {len(lost) - 2} more" if len(lost) > 2 else ""
        name = lost[0].split("'")[1]
        raise ValueError(
            f"no role is known of {', '.join(lost[:2])}{more}. HINT: overrides={{'{name}': {{'role': 'hidden'}}}} if "
            "it maps width to width, 'embedding' if it is added to the input or makes it, else 'output' or 'vector'; a "
            "pattern such as '*experts*' says it of several."
        )
    return found


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
    fans = [tensor.fan_in for tensor in tensors.values() if tensor.role == "output"]
    fans = fans or [tensor.fan_in for tensor in tensors.values() if tensor.role == "hidden"]
    fans = fans or [tensor.fan_out for tensor in tensors.values() if tensor.role == "embedding"]
    if not fans:
        raise ValueError("the model has no projection, so it has no width. HINT: give base_config instead.")
    return Counter(fans).most_common(1)[0][0]


MATRICES = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")

Place = tuple[Role, bool, str]


def _places(model: nn.Module) -> dict[int, Place]:
    """By id of every matrix whose role is known: role, whether it may be sparse, and why."""
    order = list(model.modules())
    blocks = [block for block in repeated_blocks(model).values() if not is_projection(block)]
    inside = {module for block in blocks for module in block.modules()}
    tables = [*embeddings_of(model, "input"), *(module for module in order if isinstance(module, nn.Embedding))]
    weights = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    tied = [m for m in order if isinstance(m, nn.Linear) and id(m.weight) in weights]
    heads = embeddings_of(model, "output") or tied
    projections = [module for module in order if is_projection(module) and module not in (*tables, *heads)]
    outside = [module for module in projections if module not in inside]
    first = next((place for place, module in enumerate(order) if module in inside), None)
    before = [] if first is None else [module for module in outside if order.index(module) < first]
    if not heads and (after := [module for module in outside if module not in before]):
        heads = [after[-1]]
    if not blocks and not tables and len(outside) > 1:
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


def _axis(module: nn.Module, parameter: nn.Parameter, tables: Container[int]) -> int:
    if is_transposed(module) or id(parameter) in tables:
        return 0
    return 1 if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else max(parameter.ndim - 1, 1)


def _is_vector(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """One dimension, or as good as one: the biases that nn.MultiheadAttention appends to keys and values."""
    is_appended = isinstance(module, nn.MultiheadAttention) and name.rpartition(".")[2] in ("bias_k", "bias_v")
    return parameter.ndim < 2 or is_appended
