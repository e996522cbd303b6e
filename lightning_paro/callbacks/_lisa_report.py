"""What LISA takes of memory for a model, to look at: predicted, and what is there just now."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_paro.algorithms.anatomy import dissect
from lightning_paro.algorithms.lisa_memory import (
    ModelState,
    ParameterCounts,
    adapter_parameters,
    arms,
    binary_unit,
    bytes_per_parameter,
    bytes_text,
    lisa_state,
)
from lightning_paro.planner import StateBytes

__all__ = ["MemoryReport", "memory_report"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of the model state, by what is trained; print it to see a table.

    Attributes:
        model: Name of the model's class.
        counts: Number of parameters of the model, by place.
        num_layers: Layers that LISA trains at a time in the rows named ``...L``.
        precision: Name of the precision.
        sizes: Bytes per parameter in it.
        rows: Full fine-tuning, LISA, LoRA, and what was measured.
    """

    model: str
    counts: ParameterCounts
    num_layers: tuple[int, ...]
    precision: str
    sizes: StateBytes
    rows: tuple[ModelState, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, as for JSON; bytes."""
        return {
            "model": self.model,
            "precision": self.precision,
            "bytes_per_parameter": {
                "weights": self.sizes.parameters,
                "gradients": self.sizes.gradients,
                "state": self.sizes.optimizer,
            },
            "parameters": {**vars(self.counts), "layers": list(self.counts.layers)},
            "rows": [
                {
                    "arm": row.arm,
                    "predicted": row.predicted,
                    "weights_bytes": row.weights,
                    "gradients_bytes": row.gradients,
                    "state_bytes": row.state,
                    "total_bytes": row.total,
                }
                for row in self.rows
            ],
        }

    def __rich__(self) -> Group:
        table = Table(title=f"{self.model}, {self.counts.total:,} parameters in {self.precision}")
        unit, nbytes = binary_unit(max(row.total for row in self.rows))
        table.add_column("trained")
        for name in ("weights", "gradients", "state", "together"):
            table.add_column(f"{name}, {unit}", justify="right")
        for row in self.rows:
            if not row.predicted:
                table.add_section()
            sizes = (row.weights, row.gradients, row.state, row.total)
            table.add_row(row.arm, *(f"{size / nbytes:.2f}" for size in sizes))
        return Group(table, self._remarks())

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, force_jupyter=False).print(self)
        return text.getvalue()

    def _remarks(self) -> str:
        counts, number = self.counts, max(self.num_layers)
        active, always = counts.active(number), counts.active(0)
        layer = lisa_state(counts, 1, self.sizes).total - lisa_state(counts, 0, self.sizes).total
        tied = ", which are one tensor," if counts.tied else ""
        share = always / active if active else 0.0
        return (
            "Activations come on top, and what the framework keeps for itself. E: embeddings, H: head, L: layers. With "
            f"{number}L LISA trains {active:,} parameters at a time; {share:.0%} of them are embeddings and head{tied} "
            "and what else is outside of the layers. One more layer at a time takes gradients and state of "
            f"{bytes_text(layer)}"
            + (", so their number matters less than whether embeddings and head are trained." if share > 0.5 else ".")
        )


def memory_report(
    model: nn.Module,
    num_layers: int | Sequence[int] = 2,
    *,
    layers: str | Sequence[str] = "auto",
    precision: str = "bf16-true",
    rank: int = 128,
    optimizer: Optimizer | None = None,
) -> MemoryReport:
    """Predict the model state of full fine-tuning, LISA and LoRA on one device, and measure what is there.

    Args:
        model: May be on the meta device.
        num_layers: Layers that LISA trains at a time, one number or several.
        layers: As LISA's.
        precision: As the Trainer's.
        rank: Of LoRA's adapters on every linear module of the layers; no row of a model that has adapters already.
        optimizer: If given, the bytes of the model's weights and gradients and of this optimizer's state are measured
            as well, as they are just now. What it holds counts as trained, even while LISA has frozen it. Of a rank of
            ParoStrategy ``trainer.strategy.engine.held_bytes()`` says this.

    Raises:
        ValueError: If the model has no layers, or not that many, or precision or rank is not understood.
    """
    numbers = (num_layers,) if isinstance(num_layers, int) else tuple(num_layers)
    sizes = bytes_per_parameter(precision)
    with _trainable(optimizer):
        anatomy = dissect(model, layers)
    counts = ParameterCounts.of(anatomy, sum(parameter.numel() for parameter in model.parameters()))
    adapters = adapter_parameters(model, anatomy.layers, rank)
    has_adapters = any(hasattr(module, "peft_config") for module in model.modules())
    rows = arms(counts, numbers, sizes, adapters={rank: adapters} if adapters and not has_adapters else None)
    if optimizer is not None:
        rows.append(_measured(model, optimizer))
    if has_adapters:
        rows[0] = replace(rows[0], arm="all adapters")
    return MemoryReport(type(model).__name__, counts, numbers, precision, sizes, tuple(rows))


@contextmanager
def _trainable(optimizer: Optimizer | None) -> Iterator[None]:
    """What an optimizer holds requires a gradient inside, also what LISA has frozen for now."""
    groups = [] if optimizer is None else optimizer.param_groups
    frozen = [parameter for group in groups for parameter in group["params"] if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _measured(model: nn.Module, optimizer: Optimizer) -> ModelState:
    parameters = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return ModelState("measured", _held(parameters), _held(gradients), _held(state), predicted=False)


def _held(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors, each storage once; of a sharded tensor those on this rank."""
    with torch.no_grad():
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storage.nbytes() for storage in storages.values())
