"""How sparse a model is, tensor by tensor: what was asked, what is, and whether anything is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_paro.algorithms.supar.mask_state import attached
from lightning_paro.algorithms.supar.masks import as_rows
from lightning_paro.callbacks import _reports
from lightning_paro.state_access import state_access

__all__ = ["SparsityReport"]


class SparsityReport(Callback):
    """Prints, when training begins and ends, how many weights each masked tensor has, and logs their share of all.

    Loggers get ``sparsity/density``, of all parameters of the model; ``sparsity.csv`` is in the first logger's folder.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        """Of the last report, by masked tensor: ``tensor``, ``shape``, ``density`` of its mask, ``nonzero``, the share
        of its weights that are not zero, ``weights_per_output``, the mean, and ``cut_off``, how many outputs have no
        weight at all."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "at the start")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "in the end")

    def _report(self, trainer: Trainer, module: LightningModule, when: str) -> None:
        state = attached(module)
        if state is None or not state.names(module):
            rank_zero_info("SparsityReport: no tensor has a mask. HINT: SparseMask, or a SuParPlan with a density.")
            return
        names = state.names(module)
        axes = {name: state.entry(module, name).axis for name in names}
        self.rows = []
        with state_access(trainer).full_parameters(module), torch.no_grad():  # on all ranks
            for name in names:
                value = module.get_parameter(name).detach()
                mask = state.mask(module, name)
                per_output = as_rows(mask, axes[name]).sum(1)
                self.rows.append({
                    "tensor": name, "shape": tuple(mask.shape), "density": mask.float().mean().item(),
                    "nonzero": (value != 0).float().mean().item(),
                    "weights_per_output": per_output.float().mean().item(), "cut_off": int((per_output == 0).sum()),
                })  # fmt: skip
        total = sum(parameter.numel() for parameter in module.parameters())
        masked = sum(_count(row) * (1 - row["density"]) for row in self.rows)
        if trainer.is_global_zero:
            Console().print(_table(self.rows, f"{when}: {1 - masked / total:.2%} of {total:,} parameters are kept"))
            for logger in trainer.loggers:
                logger.log_metrics({"sparsity/density": 1 - masked / total}, trainer.global_step)
        folder = trainer.log_dir if trainer.loggers else None
        if folder is not None and trainer.is_global_zero:
            rows = (list(row.values()) for row in self.rows)
            _reports.write_table("SparsityReport", f"{folder}/sparsity.csv", list(self.rows[0]), rows)


def _count(row: dict[str, Any]) -> int:
    return int(torch.Size(row["shape"]).numel())


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=f"Sparsity {title}")
    table.add_column("tensor", overflow="fold")
    for name in ("shape", "density", "not zero", "weights\nan output", "cut off"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shape = " × ".join(map(str, row["shape"]))
        shares = (f"{row['density']:.4%}", f"{row['nonzero']:.4%}", f"{row['weights_per_output']:.1f}")
        table.add_row(row["tensor"], shape, *shares, str(row["cut_off"]))
    return table
