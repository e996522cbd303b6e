"""What the guideline would have chosen, beside what was measured to be fastest."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.lab.contestants import partitions
from benchmarks.lab.models import block_numel, build, stack_of
from lightning_paro.planner import Network, StateBytes, Workload, cost
from lightning_paro.topology import Partition, Topology

__all__ = ["BLOCKS", "compare", "workload"]

BLOCKS = 4
"""Blocks a launch or unit, as planned."""


def workload(model: str, accumulate: int, compute: float, precision: str) -> Workload:
    """What the planner is told about a model."""
    built = build(model, torch.device("meta"))
    parent, name = stack_of(built)
    total, block = sum(parameter.numel() for parameter in built.parameters()), block_numel(built)
    rest = total - len(getattr(parent, name)) * block
    sizes = StateBytes.of(precision)
    return Workload(
        total, accumulate=accumulate, compute=compute, rest=rest, largest_unit=BLOCKS * block, sizes=sizes
    )  # fmt: skip


def compare(races: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Predict every partition of a run where the planner knows the network and the micro-batch.

    Args:
        races: The report of uneven.py.
        scaling: That of scaling.py: what the probe measured on such a cluster, and the time of a micro-batch.

    Returns:
        By ``settings``, each of the run with the most partitions, since times of several do not compare: ``rows``,
        fastest first, of what was predicted and measured, and ``choices``, what the planner would recommend among those
        whose measured memory is within a limit, for every limit that changes the choice or who is fastest.
    """
    setup = scaling["setup"]
    place = {key: setup[key] for key in ("device", "hosts", "ranks_per_host", "gpus")}
    topology = Topology(setup["hosts"] * setup["ranks_per_host"], setup["ranks_per_host"])
    network = Network(topology, **scaling["links_bytes_per_s"])
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for part in races["setups"]:
        if place.items() <= part["setup"].items():
            for table in part["tables"]:
                setting = (table["model"], table["accumulate"])
                rows = [row for row in table["rows"] if row["contestant"] in partitions() and row["repeats"]]
                measured[setting] = max(measured.get(setting, []), rows, key=len)
    settings = []
    for (model, accumulate), found in measured.items():
        compute = scaling["micro_batch_s"].get(model)
        if compute is not None and len(found) > 1:
            work = workload(model, accumulate, compute, "bf16-mixed")
            rows = sorted((_row(row, work, network) for row in found), key=lambda row: row["measured_s"])
            settings.append({"model": model, "accumulate": accumulate, "rows": rows, "choices": _choices(rows)})
    return {"setup": setup, "settings": settings}


def _row(row: dict[str, Any], work: Workload, network: Network) -> dict[str, Any]:
    name = row["contestant"].removeprefix("paro_")
    expected = cost(Partition.parse(name), work, network)
    return {
        "partition": name, "measured_s": row["step_s"], "predicted_s": expected.step_s,
        "error": expected.step_s / row["step_s"] - 1, "peak_bytes": row["peak_bytes"],
        "predicted_bytes": expected.memory_bytes,
    }  # fmt: skip


def _choices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the largest limit down; peaks within a hundredth of it are within it."""
    choices: list[dict[str, Any]] = []
    for limit in sorted({row["peak_bytes"] for row in rows}, reverse=True):
        fitting = [row for row in rows if row["peak_bytes"] <= 1.01 * limit]
        chosen = min(fitting, key=lambda row: (row["predicted_s"], row["predicted_bytes"]))
        fastest = min(fitting, key=lambda row: row["measured_s"])
        told: dict[str, Any] = {"chosen": chosen["partition"], "fastest": fastest["partition"]}
        told["costs"] = chosen["measured_s"] / fastest["measured_s"] - 1
        if not choices or told.items() - choices[-1].items():
            choices.append(told)
        choices[-1]["from_bytes"] = limit
    return choices
