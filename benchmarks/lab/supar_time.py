"""What masks cost in training: steps and memory of a dense GPT, of a masked one, and of one masked as peers do it."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from benchmarks.lab.lisa_runs import setup_of
from benchmarks.lab.report import save
from benchmarks.lab.supar_models import Writer
from benchmarks.lab.supar_runs import trainer_of
from benchmarks.lab.train import Clock
from lightning_paro.experiments import Setting
from lightning_paro.experiments._settings import train

__all__ = ["ARMS", "measure_time"]

ARMS = ("dense", "masked", "parametrized")
"""``"masked"`` is SparseMask's; ``"parametrized"`` multiplies weights by masks in every forward, as the reference code
and torch's pruning do."""
SHAPES: tuple[tuple[str, int, int, int], ...] = (("gpt", 1024, 64, 256), ("gpt-4-layers", 2048, 4, 2048))
"""Subject, width, sequences, length."""
DENSITY, REPEATS, WARMUP, MEASURED = 1 / 8, 3, 5, 20


class _Product(nn.Module):
    """Weight times mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask  # type: ignore[no-any-return, operator]


class _Watch(Callback):
    """Times steps, and takes the memory of the last ones."""

    def __init__(self) -> None:
        self.clock = Clock(on_gpu=True)
        self.peak = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.mark()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()


class _Parametrized(Writer):
    """The masks of another, in the forward."""

    def __init__(self, name: str, width: int, masked: Writer) -> None:
        super().__init__(name, Setting("supar", width, 1.0, seed=0))
        self.groups = self.supar_param_groups(self.lr)  # found by names that parametrizations change
        plan = masked.supar_plan
        assert plan is not None
        for path in plan.sparse:
            owner, _, own = path.rpartition(".")
            parametrize.register_parametrization(self.model.get_submodule(owner), own, _Product(plan.mask(path)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([dict(group) for group in self.groups], betas=(0.9, 0.95), fused=True)


def measure_time(arguments: argparse.Namespace) -> None:
    """Train all arms one after another, so often; a row an arm and shape, with medians over all its steps."""
    rows = []
    for name, width, batch, length in SHAPES:
        text = torch.randint(256, (WARMUP + MEASURED, batch, length), generator=torch.Generator().manual_seed(0))
        masked = Writer(name, Setting("supar", width, DENSITY, seed=0))
        modules = {
            "dense": Writer(name, Setting("supar", width, 1.0, seed=0)),
            "masked": masked,
            "parametrized": _Parametrized(name, width, masked),
        }
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        peaks = dict.fromkeys(ARMS, 0)
        for _ in range(REPEATS):
            for arm, module in modules.items():
                watch = _Watch()
                data = DataLoader(list(text), batch_size=None)  # type: ignore[arg-type]
                train(lambda _, module=module: module, _ANY, data, len(text), [watch], trainer_of("cuda"))  # type: ignore[misc]
                seconds[arm] += watch.clock.seconds()[WARMUP - 1 :]
                peaks[arm] = max(peaks[arm], watch.peak)
                module.zero_grad()
        for arm, module in modules.items():
            rows.append({
                "subject": name, "width": width, "batch": batch, "length": length, "arm": arm,
                "density": 1.0 if arm == "dense" else DENSITY, "repeats": REPEATS,
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "step_s": statistics.median(seconds[arm]),
                "range_s": [min(seconds[arm]), max(seconds[arm])],
                "peak_bytes": peaks[arm],
            })  # fmt: skip
            save({"setup": setup_of("cuda"), "rows": rows}, arguments.out)
    table = Table("subject", "arm", "ms", "peak GiB")
    for row in rows:
        table.add_row(row["subject"], row["arm"], f"{1e3 * row['step_s']:.3f}", f"{row['peak_bytes'] / 2**30:.3f}")
    Console(width=100).print(table)


_ANY = Setting("supar", 0, 1.0, 0)
