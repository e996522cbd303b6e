"""``lightning-paro probe``: how fast the links between the ranks are."""

from __future__ import annotations

import json as json_module
import os
from dataclasses import asdict
from pathlib import Path

from lightning.fabric import Fabric
from rich.console import Console

from lightning_paro import planner
from lightning_paro.cli.plan import GIGABIT
from lightning_paro.collectives import ProcessGroups
from lightning_paro.topology import Topology

__all__ = ["probe"]


def probe(
    *,
    devices: int | str = "auto",
    nodes: int = 1,
    group: int | None = None,
    accelerator: str = "auto",
    json: Path | None = None,
) -> None:
    """Measure the bandwidths that plan needs, on the machines that will train.

    Start it as you start training: once a host with Lightning's variables, or by torchrun or srun.

    Args:
        devices: Ranks of a host.
        nodes: Number of hosts.
        group: Ranks a group; those of a host unless told.
        accelerator: As the Trainer's.
        json: Write the measurements to this file.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
    if launched is not None and devices == "auto":
        devices, nodes = int(launched), int(os.environ["WORLD_SIZE"]) // int(launched)
    fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    size = fabric.world_size // nodes if group is None else group
    groups = ProcessGroups.create(Topology(fabric.world_size, size))
    if fabric.world_size == 1:
        raise ValueError("there is one rank, and no link to measure. HINT: for example --devices 4.")
    measured = planner.probe(groups, fabric.device)
    if not fabric.is_global_zero:
        return
    network = measured.network()
    console = Console()
    console.print(planner.probe_table(measured))
    options = [f"--world {fabric.world_size} --group {size}"]
    for name, bandwidth in network.bandwidths.items():
        if bandwidth is not None and bandwidth != float("inf"):
            options.append(f"--{name} {bandwidth / GIGABIT:.4g}")
    console.print(f"For the plan: lightning-paro plan {' '.join(options)} ...", soft_wrap=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(json_module.dumps(asdict(measured), indent=2) + "\n", encoding="utf-8")
