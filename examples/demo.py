"""Train a small GPT-2 on Python's standard library in four processes that stand for two hosts; `make demo` runs it.

Lightning starts this script once per rank. Whatever is printed comes from rank 0.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from byte_gpt import ByteGPT, StandardLibrary
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from lightning_paro import ParoStrategy

GROUP_SIZE, DEVICES = 2, 4
STEPS, RESUMED_STEPS = 160, 10  # optimizer steps
MICRO_BATCHES = 2  # a step
CHECKPOINT = Path("checkpoints/demo.ckpt")

warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning and torch


class Meter(Callback):
    """Losses, speed, and the bytes this rank holds and sends while it trains."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.held = self.inside = self.between = self.tokens = 0

    def on_train_start(self, trainer: Trainer, module: ByteGPT) -> None:
        self.engine = trainer.strategy.engine
        self.engine.traffic.reset()
        self.start = perf_counter()

    def on_after_backward(self, trainer: Trainer, module: ByteGPT) -> None:
        self.held = max(self.held, sum(self.engine.held_bytes().values()))

    def on_train_batch_end(self, trainer: Trainer, module: ByteGPT, outputs: Any, batch: torch.Tensor, _: int) -> None:
        self.losses.append(outputs["loss"].item() * trainer.accumulate_grad_batches)
        self.tokens += batch.numel() * trainer.world_size
        self.seconds = perf_counter() - self.start
        self.inside, self.between = self.engine.traffic.intra, self.engine.traffic.inter


def train(steps: int, epochs: int = 1, resume: Path | None = None) -> tuple[Trainer, Meter]:
    """Train to the end of epoch ``epochs``, an epoch being ``steps`` optimizer steps."""
    has_gpus = torch.cuda.device_count() >= DEVICES
    meter = Meter()
    trainer = Trainer(
        strategy=ParoStrategy("iig", group_size=GROUP_SIZE),
        devices=DEVICES,
        accelerator="gpu" if has_gpus else "cpu",
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=1.0,
        limit_train_batches=steps * MICRO_BATCHES,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    where = "GPUs" if has_gpus else "CPU processes"
    trainer.print(f"{'Resuming' if resume else 'Training'} on {DEVICES} {where}, in groups of {GROUP_SIZE}.")
    trainer.fit(ByteGPT(), StandardLibrary(), ckpt_path=resume, weights_only=True)
    return trainer, meter


def training_table(trainer: Trainer, trained: Meter, resumed: Meter) -> Table:
    def mean(values: list[float]) -> str:
        return f"{sum(values) / len(values):.2f}"

    window = 10 * MICRO_BATCHES
    table = Table("training", f"paro_{trainer.strategy.partition}")
    table.add_row("parameters", f"{sum(p.numel() for p in trainer.lightning_module.parameters()):,}")
    table.add_row("loss of the first step, nats a byte", mean(trained.losses[:MICRO_BATCHES]))
    table.add_row(f"loss of steps {STEPS - 9} to {STEPS}", mean(trained.losses[-window:]))
    table.add_row(f"loss of steps {STEPS + 1} to {STEPS + RESUMED_STEPS}, resumed", mean(resumed.losses))
    table.add_row(f"loss on held-out files after step {STEPS}", f"{trainer.callback_metrics['held_out']:.2f}")
    table.add_row("tokens per second, all ranks", f"{trained.tokens / trained.seconds:,.0f}")
    return table


def bytes_table(trained: Meter) -> Table:
    """What was measured, against the formulas of docs/paro.md and against what others would need."""
    engine = trained.engine
    n, m, ng, s = engine.topology.world_size, GROUP_SIZE, engine.topology.num_groups, MICRO_BATCHES
    sizes = {unit.name: sum(flat.numel * flat.dtype.itemsize for flat in unit.flats) for unit in engine.units}
    whole = sum(sizes.values())
    # for forward and for backward; the rest stays whole in between, and so does the last block, from the second time on
    last = sizes[engine.units[-1].name]
    gathered = s * (2 * whole - sizes["rest"] - last) + last / STEPS
    ring = whole * (n - 1) / n  # over each link of a flat ring, to gather or to reduce once

    table = Table("MB", "measured", "formula", "DDP", "FSDP")
    table.caption = f"{s} micro-batches a step; DDP and FSDP by formula, on a flat ring"
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, *values: float) -> None:
        table.add_row(name, *(f"{value / 1e6:.3f}" for value in values))

    inside, between = (m * sent / STEPS for sent in (trained.inside, trained.between))
    add("model state on a rank", trained.held, engine.model_state_bytes(), 4 * whole, 4 * whole / n)
    add("moved inside a group in a step", inside, (m - 1) * (gathered + s * whole), 2 * ring, 3 * s * ring)
    add("sent out of a group in a step", between, 2 * whole * (ng - 1) / ng, 2 * ring, 3 * s * ring)
    return table


def main() -> None:
    seed_everything(1, verbose=False)
    trainer, trained = train(STEPS)
    trainer.save_checkpoint(CHECKPOINT, weights_only=False)
    _, resumed = train(RESUMED_STEPS, epochs=2, resume=CHECKPOINT)
    if not trainer.is_global_zero:
        return
    console = Console()
    console.print(training_table(trainer, trained, resumed), bytes_table(trained))
    console.print(f"A line from {CHECKPOINT}, in one process without lightning_paro:")
    generate = Path(__file__).with_name("generate.py")
    subprocess.run([sys.executable, generate, CHECKPOINT, "    def __init__(self, "], check=True)


if __name__ == "__main__":
    main()
