"""GPT-2 medium on two GPUs posing as two hosts of two ranks: do strategies learn alike, in the memory they state?

Each "host" is a real Lightning node. Ranks of one host use both GPUs and talk over NVLink; hosts talk over TCP, because
NCCL decides by NCCL_HOSTID who shares a host. Run on a machine with two GPUs::

    python benchmarks/posed_cluster.py --out benchmarks/results/posed_cluster.json

The table compares, per strategy, 30 optimizer steps in bf16-mixed with DDP in bf16-mixed. What "bf16 noise" is, is
measured too: DDP in bf16-mixed against DDP in fp32. Peak memory per rank stands beside formula + activations, the
latter measured by one process that does nothing but forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning_paro
from examples.byte_gpt import ByteGPT, StandardLibrary

RUNS = ["ddp/32-true", "ddp/bf16-mixed", *(f"paro_{p}/bf16-mixed" for p in ("nig", "iig", "igg", "ggg"))]
MEDIUM = {"width": 1024, "layers": 24, "heads": 16, "context": 512}
MICRO_BATCH, ACCUMULATE, STEPS, HOSTS, PER_HOST = 4, 2, 30, 2, 2


def build_model() -> ByteGPT:
    seed_everything(0)
    return ByteGPT(**MEDIUM, lr=3e-4)


class Recorder(Callback):
    """Loss of every optimizer step, averaged over ranks and micro-batches; time per step; peak memory."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []
        self._window: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._window.append(outputs["loss"].detach())
        if len(self._window) == ACCUMULATE:
            loss = torch.stack(self._window).sum()  # Lightning has divided each by the number of micro-batches
            self.losses.append(trainer.strategy.reduce(loss).item())
            self.times.append(time.perf_counter())
            self._window.clear()
            if len(self.times) == 3:  # optimizer state and allocator pools exist by now
                torch.cuda.reset_peak_memory_stats()


def train(run: str, out: Path) -> None:
    """One rank of one run."""
    name, precision = run.split("/")
    strategy = DDPStrategy() if name == "ddp" else lightning_paro.ParoStrategy(name, group_size=PER_HOST)
    recorder = Recorder()
    trainer = Trainer(
        strategy=strategy, precision=precision, accelerator="gpu", devices=PER_HOST, num_nodes=HOSTS, max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE, gradient_clip_val=1.0, callbacks=[recorder], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(build_model(), StandardLibrary(MEDIUM["context"], MICRO_BATCH))
    record = {"losses": recorder.losses, "times": recorder.times, "peak": torch.cuda.max_memory_allocated()}
    if name != "ddp":
        traffic = strategy.engine.traffic
        record |= {"formula": strategy.engine.model_state_bytes(), "intra": traffic.intra, "inter": traffic.inter}
    out.with_suffix(f".{trainer.global_rank}.json").write_text(json.dumps(record))


def activations() -> int:
    """Peak bytes of a forward and backward beside parameters and gradients, in one process without communication."""
    data = StandardLibrary(MEDIUM["context"], MICRO_BATCH)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    batch = batch.cuda()
    model = build_model().to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model.training_step(batch)
        loss.backward()
        del loss
    return torch.cuda.max_memory_allocated() - before


def launch(run: str, out: Path) -> list[dict[str, Any]]:
    """Start both hosts of a run and collect what their ranks recorded."""
    port = str(20000 + os.getpid() % 20000 + RUNS.index(run))
    hosts = []
    for host in range(HOSTS):
        posed = {
            "NODE_RANK": str(host), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{host}",
            "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, __file__, "--run", run, "--out", str(out)]
        hosts.append(subprocess.Popen(command, env={**os.environ, **posed}))
    codes = [host.wait() for host in hosts]
    if any(codes):
        raise RuntimeError(f"{run}: the hosts ended with {codes}")
    return [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(HOSTS * PER_HOST)]


def compare(out: Path) -> None:
    """All runs, one table, one JSON."""
    with tempfile.TemporaryDirectory() as folder:
        python = [sys.executable, __file__, "--activations"]
        extra = int(subprocess.run(python, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])
        results = {run: launch(run, Path(folder) / run.replace("/", "_")) for run in RUNS}
    reference = torch.tensor(results["ddp/bf16-mixed"][0]["losses"])
    rows = []
    for run, ranks in results.items():
        losses, times = torch.tensor(ranks[0]["losses"]), torch.tensor(ranks[0]["times"], dtype=torch.float64)
        formula = ranks[0].get("formula")
        peak = max(rank["peak"] for rank in ranks)
        rows.append({
            "run": run, "losses": losses.tolist(), "max_difference_to_ddp": (losses - reference).abs().max().item(),
            "mean_difference_to_ddp": (losses - reference).abs().mean().item(),
            "median_step_s": times.diff()[5:].median().item(), "peak_bytes": [rank["peak"] for rank in ranks],
            "formula_bytes": formula, "predicted_bytes": formula and formula + extra,
            "peak_over_predicted": formula and peak / (formula + extra),
            "intra_bytes_per_step": ranks[0].get("intra", 0) / STEPS,
            "inter_bytes_per_step": ranks[0].get("inter", 0) / STEPS,
        })  # fmt: skip
    parameters = sum(p.numel() for p in build_model().parameters())
    report = {
        "setup": {
            "model": MEDIUM, "parameters": parameters, "micro_batch": MICRO_BATCH, "accumulate": ACCUMULATE,
            "steps": STEPS, "hosts": HOSTS, "ranks_per_host": PER_HOST, "activation_bytes": extra,
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "lightning": lightning.__version__,
            "transformers": transformers.__version__, "lightning_paro": lightning_paro.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        },
        "rows": rows,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1))
    show(report)


def show(report: dict[str, Any]) -> None:
    setup = report["setup"]
    millions = setup["parameters"] / 1e6
    table = Table(title=f"{millions:.0f} M parameters, {HOSTS} posed hosts x {PER_HOST}, {setup['device']}")
    for column in ("run", "loss first", "last", "max |Δ| to DDP", "s/step", "peak MiB", "formula + act.", "ratio"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        predicted, ratio = row["predicted_bytes"], row["peak_over_predicted"]
        table.add_row(
            row["run"], f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}", f"{row['max_difference_to_ddp']:.4f}",
            f"{row['median_step_s']:.3f}", f"{max(row['peak_bytes']) / 2**20:.0f}",
            f"{predicted / 2**20:.0f}" if predicted else "", f"{ratio:.3f}" if ratio else "",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/posed_cluster.json"))
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--activations", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < 2:
        parser.error(f"2 GPUs are needed, found {torch.cuda.device_count()}. HINT: run it where there are 2.")
    if arguments.activations:
        print(activations())
    elif arguments.run:
        train(arguments.run, arguments.out)
    else:
        compare(arguments.out)
