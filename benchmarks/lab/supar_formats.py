"""How fast masked linear layers are on a GPU in each format of the export, shape by shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.lab.lisa_runs import setup_of
from benchmarks.lab.report import save_whole
from lightning_paro.algorithms.supar import Masks
from lightning_paro.algorithms.supar.exports.semi_structured import cuda_timer, sparsified
from lightning_paro.algorithms.supar.exports.sparse_linear import SparseLinear, weight_of
from lightning_paro.algorithms.supar.masks import draw_mask

__all__ = ["FORMATS", "measure_formats"]

SHAPES = ((1024, 1024), (4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
ROWS = (16, 512, 4096, 16384)


def _compressed(block: int | None, layer: nn.Module) -> nn.Module:
    return SparseLinear(weight_of(layer), None, block)


FORMATS: dict[str, tuple[Masks, Callable[[nn.Module], nn.Module]]] = {
    "2:4": (Masks("nm", n=2, m=4), sparsified),
    "CSR, 1/16": (Masks("random", density=1 / 16), partial(_compressed, None)),
    "BSR of 64, 1/4": (Masks("block", density=1 / 4, block=64), partial(_compressed, 64)),
}
"""Masks, and what makes the sparse layer of a dense one."""


@torch.no_grad()
def measure_formats(arguments: argparse.Namespace) -> None:
    """A row a shape and number of rows: microseconds dense and in each format, in bfloat16, launch included."""
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        layers = {"dense": _layer(shape, None)}
        layers |= {name: convert(_layer(shape, masks)) for name, (masks, convert) in FORMATS.items()}
        for rows in ROWS:
            values = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
            times = {name: _time(layer, values) for name, layer in layers.items()}
            found.append({"out": shape[0], "in": shape[1], "rows": rows, "us": times})
            save_whole({"setup": setup_of("cuda"), "rows": found}, arguments.out)
    table = Table("out x in", "rows", *found[0]["us"])
    for row in found:
        cells = ("-" if time is None else f"{time:.1f}" for time in row["us"].values())
        table.add_row(f"{row['out']} x {row['in']}", str(row["rows"]), *cells)
    Console(width=120).print(table)


def _layer(shape: tuple[int, int], masks: Masks | None) -> nn.Module:
    layer = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=shape[1] ** -0.5)
    if masks is not None:
        layer.weight *= draw_mask(masks, "layer", shape, 1, masks.density).cuda()
    return layer


def _time(layer: nn.Module, values: torch.Tensor) -> float | None:
    """Microseconds, or None where there is no kernel for it."""
    try:
        layer(values)
    except RuntimeError:
        return None
    time = cuda_timer(lambda: layer(values))
    return time if math.isfinite(time) else None
