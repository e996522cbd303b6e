"""The precision table of docs/paro.md, and sessions that train in one of its rows."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_paro.strategies.precision import adopt, policy_for
from tests.distributed.sessions import Cell, Session, Setting

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Row(NamedTuple):
    """A row of the table in docs/paro.md."""

    precision: str
    parameters: torch.dtype
    outputs: torch.dtype  # of a matrix product: what autocast, or the lack of it, makes
    buffers: torch.dtype
    accumulator: torch.dtype
    intra: torch.dtype
    inter: torch.dtype
    master: torch.dtype  # and of the optimizer's state
    options: dict[str, str] = {}  # noqa: RUF012 - of a tuple, which nobody changes

    @property
    def has_master(self) -> bool:
        return self.master is not self.parameters


TABLE = [
    Row("32-true", FP32, FP32, FP32, FP32, FP32, FP32, FP32),
    Row("64-true", FP64, FP64, FP64, FP64, FP64, FP64, FP64),
    Row("bf16-mixed", BF16, BF16, FP32, FP32, BF16, BF16, FP32),
    Row("bf16-mixed", BF16, BF16, FP32, BF16, BF16, BF16, FP32, {"grad_dtype": "bfloat16"}),
    Row("bf16-mixed", BF16, BF16, FP32, FP32, FP32, FP32, FP32, {"reduce_dtype": "float32"}),
    Row("bf16-true", BF16, BF16, BF16, BF16, BF16, BF16, BF16),
    Row("bf16-true", BF16, BF16, BF16, FP32, BF16, BF16, BF16, {"grad_dtype": "float32"}),
    Row("16-mixed", FP16, FP16, FP32, FP32, FP16, FP32, FP32),
]

ROWS = {row.precision: row for row in TABLE if not row.options}


def lightning_plugin(precision: str, **scaler: Any) -> Precision:
    if precision.endswith("mixed"):
        given = torch.amp.GradScaler("cpu", **scaler) if precision == "16-mixed" else None
        return MixedPrecision(precision, "cpu", given)  # type: ignore[arg-type]
    return {"32-true": Precision, "64-true": DoublePrecision, "bf16-true": partial(HalfPrecision, "bf16-true")}[
        precision
    ]()


def start(row: Row, setting: Setting, module: nn.Module, units: Any = (Cell,)) -> tuple[Session, Any]:
    plugin = adopt(lightning_plugin(row.precision, init_scale=1024.0))
    session = Session(plugin.convert_module(module), setting, units=units, policy=policy_for(plugin, **row.options))
    plugin.engine = session.engine
    return session, plugin
