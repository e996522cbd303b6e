"""2:4 sparsity where it is faster: every shape is measured, dense and sparse, and the faster one is taken."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from lightning_paro.algorithms.supar.exports.sparse_linear import masked_layers, put, weight_of
from lightning_paro.algorithms.supar.masks import as_rows

__all__ = ["Timer", "Timing", "Timings", "check_groups", "cuda_timer", "measure", "semi_structured"]

Timer = Callable[[Callable[[], object]], float]
"""Microseconds that a call takes."""


@dataclass(frozen=True)
class Timing:
    """A shape, dense and sparse.

    Attributes:
        shape: ``(out, in)`` of the weight.
        count: Layers of this shape.
        dense: Microseconds.
        sparse: Microseconds; infinite if the shape is not supported.
    """

    shape: tuple[int, int]
    count: int
    dense: float
    sparse: float

    @property
    def is_sparse(self) -> bool:
        """Whether sparse is faster, and was taken."""
        return self.sparse < self.dense


@dataclass(frozen=True)
class Timings:
    """What was measured, shape by shape; print it to see a table.

    Attributes:
        device: The name of the device.
        dtype: Of weights and inputs.
        rows: Rows of the inputs.
        timings: One a shape.
    """

    device: str
    dtype: str
    rows: int
    timings: tuple[Timing, ...]

    def __rich__(self) -> Table:
        table = Table(title=f"2:4 on {self.device}, {self.dtype}, {self.rows} rows")
        for column in ("out x in", "layers", "dense µs", "2:4 µs", "chosen"):
            table.add_column(column, justify="right", no_wrap=True)
        for of in self.timings:
            sparse = "not supported" if math.isinf(of.sparse) else f"{of.sparse:.1f}"
            chosen = "2:4" if of.is_sparse else "dense"
            table.add_row(f"{of.shape[0]} x {of.shape[1]}", str(of.count), f"{of.dense:.1f}", sparse, chosen)
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, force_jupyter=False).print(self)
        return text.getvalue()


def check_groups(name: str, mask: Tensor, axis: int) -> None:
    """Refuse a mask that keeps more than two of four neighbours along the fan-in.

    Args:
        name: Of the parameter.
        mask: Bool, of two dimensions.
        axis: The dimension of fan-in.

    Raises:
        ValueError: If it does.
    """
    rows = as_rows(mask, axis)
    if rows.shape[1] % 4:
        raise ValueError(f"'{name}' has a fan-in of {rows.shape[1]}; expected a multiple of 4. HINT: exclude it.")
    kept = int(rows.reshape(len(rows), -1, 4).sum(-1).max())
    if kept > 2:
        raise ValueError(
            f"the mask of '{name}' keeps {kept} of 4 neighbours; expected at most 2. HINT: train with "
            "masks=Masks('nm', n=2, m=4), or to='csr'."
        )


def semi_structured(model: nn.Module, names: list[str], rows: int) -> Timings:
    """Give masked linear layers 2:4 weights, those whose shape is faster so.

    Args:
        model: To be changed; on a CUDA device, in bfloat16 or float16.
        names: Of the masked parameters, all 2:4.
        rows: Of the inputs that are measured: batch size times length.

    Raises:
        ValueError: If there is no masked linear layer, or it is elsewhere or of another dtype.
    """
    layers = masked_layers(model, names)
    name, first = next(iter(layers.items()))
    weight = weight_of(first)
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"'{name}.weight' is {weight.dtype} on {weight.device}; expected bfloat16 or float16 on a CUDA device, "
            "where 2:4 has kernels and can be measured. HINT: module.to('cuda', torch.bfloat16), or to='csr'."
        )
    timings = measure(layers, rows, cuda_timer, sparsified)
    faster = {timing.shape for timing in timings if timing.is_sparse}
    put(model, {part: sparsified(part) for part in layers.values() if tuple(weight_of(part).shape) in faster})
    return Timings(torch.cuda.get_device_name(weight.device), str(weight.dtype).removeprefix("torch."), rows, timings)


@torch.no_grad()
def measure(
    layers: Mapping[str, nn.Module], rows: int, timer: Timer, convert: Callable[[nn.Module], nn.Module]
) -> tuple[Timing, ...]:
    """Time one layer of every shape, as it is and converted.

    Args:
        layers: Linear layers, by name.
        rows: Of the input, ``(rows, in)``.
        timer: How long a call takes.
        convert: Makes the sparse layer; a RuntimeError says that the shape is not supported.
    """
    by_shape: dict[tuple[int, int], list[nn.Module]] = {}
    for layer in layers.values():
        by_shape.setdefault(tuple(weight_of(layer).shape), []).append(layer)  # type: ignore[arg-type]
    found = []
    for shape, alike in by_shape.items():
        dense = alike[0]
        weight = weight_of(dense)
        values = torch.randn(rows, shape[1], device=weight.device, dtype=weight.dtype)
        try:
            sparse = convert(dense)
            sparse(values)
        except RuntimeError:
            time = math.inf
        else:
            time = timer(lambda layer=sparse, values=values: layer(values))  # type: ignore[misc]
        found.append(Timing(shape, len(alike), timer(lambda layer=dense, x=values: layer(x)), time))  # type: ignore[misc]
    return tuple(found)


def sparsified(layer: nn.Module) -> nn.Module:
    """An nn.Linear with the 2:4 weight of a linear layer."""
    weight, bias = weight_of(layer), layer.bias
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(to_sparse_semi_structured(weight), requires_grad=False)
    if isinstance(bias, Tensor):
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made.eval()


def cuda_timer(call: Callable[[], object]) -> float:
    """Microseconds of a call on the CUDA device, launch included: the median over a fifth of a second."""
    from torch.utils.benchmark import Timer as Benchmark

    return 1e6 * Benchmark("call()", globals={"call": call}).blocked_autorange(min_run_time=0.2).median
