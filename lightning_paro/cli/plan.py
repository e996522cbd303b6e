"""``lightning-paro plan``: which partition to take for a model, a cluster and a memory, without running anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningModule

from lightning_paro import planner
from lightning_paro.cli._hugging_face import model_of_config
from lightning_paro.cli._output import console, make_folders
from lightning_paro.planner import Network, Plan, StateBytes, Workload
from lightning_paro.sharding import find_units
from lightning_paro.topology import Topology

__all__ = ["plan"]

GIGABIT = 1e9 / 8
GIGABYTE = 1e9


def plan(
    *,
    group: int,
    memory: float,
    inter: float | None = None,
    intra: float | None = None,
    world: int | None = None,
    params: float | None = None,
    hf: str | None = None,
    model: Callable[[], LightningModule] | None = None,
    trainable: float | None = None,
    accumulate: int = 1,
    compute: float = 0.0,
    activations: float = 0.0,
    nic: Literal["host", "gpu"] = "host",
    column: float | None = None,
    ring: float | None = None,
    precision: Literal["bf16-mixed", "bf16-true", "16-mixed", "32-true", "64-true"] = "bf16-mixed",
    grad_dtype: Literal["float32", "bfloat16"] | None = None,
    reduce_dtype: Literal["float32", "bfloat16"] | None = None,
    collectives: Literal["paro-cc", "flat"] = "paro-cc",
    scale: str | None = None,
    json: Path | None = None,
    csv: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Compute memory and time of every partition, and recommend the fastest that fits.

    Args:
        group: Ranks a group, a host as a rule.
        memory: Memory of a GPU, GB of 10^9 bytes.
        inter: Bandwidth out of a host, Gbit/s; not needed with one group.
        intra: Bandwidth between two GPUs of a host, Gbit/s; not needed with one rank a group.
        world: Number of ranks; or give scale.
        params: Number of parameters, such as 7e9; or give hf or model.
        hf: A Hugging Face config to count parameters of: a folder or config.json, or a name on the Hub.
        model: A LightningModule to count parameters of, by class path.
        trainable: Number of parameters that are trained; all unless told, or those of the model that are.
        accumulate: Micro-batches a step.
        compute: Seconds of forward and backward of a micro-batch.
        activations: Activations of a micro-batch, GB.
        nic: Whether a host has one network card, or each GPU has one of its own.
        column: Bandwidth between two GPUs of different hosts while all are busy, Gbit/s, as probe measures it; decides
            instead of nic.
        ring: Bandwidth of each GPU in a flat ring over all, Gbit/s, as probe measures it; decides instead of inter for
            flat collectives.
        precision: As the Trainer's.
        grad_dtype: As ParoStrategy's.
        reduce_dtype: As ParoStrategy's.
        collectives: How a collective over all ranks is done, in two levels or on a flat ring.
        scale: Plan for several numbers of ranks instead, FROM:TO by doubling, such as 16:4096.
        json: Write the plan to this file.
        csv: Write the rows to this file.
        plot: Draw memory against time into this file.
    """
    given = {"inter": inter, "intra": intra, "column": column, "ring": ring, "memory": memory}
    for name, value in given.items():
        if value is not None and not value > 0:
            unit = "GB of 10^9 bytes" if name == "memory" else "Gbit/s"
            raise ValueError(f"{name}={value:g} is not understood: expected {unit}, above 0.")
    counted, trained, rest, largest = _count(params, hf, model)
    workload = Workload(
        counted,
        trained if trainable is None else trainable,
        accumulate,
        compute=compute,
        activations=activations * GIGABYTE,
        rest=rest,
        largest_unit=largest,
        sizes=StateBytes.of(precision, grad_dtype, reduce_dtype),
    )
    worlds = _worlds(scale) if scale is not None else [] if world is None else [world]
    if not worlds:
        raise ValueError("neither world nor scale says how many ranks there are. HINT: for example --world 32.")
    if scale is not None and world is not None:
        raise ValueError(f"world={world} and scale={scale!r} both say how many ranks there are. HINT: leave one out.")
    inter, intra = _links(inter, intra, max(worlds), group)
    measured = (bandwidth and bandwidth * GIGABIT for bandwidth in (column, ring))
    network = Network(Topology(worlds[0], group), inter * GIGABIT, intra * GIGABIT, nic, *measured)
    screen = console(160)
    result: Plan | list[Plan]
    if scale is None:
        result = planner.make_plan(workload, network, memory * GIGABYTE, collectives)
        screen.print(planner.table(result))
        if result.recommended is None:
            least = min(row.cost.memory_bytes for row in result.rows) / GIGABYTE
            screen.print(
                f"Nothing fits: the least is {least:.2f} GB and 5 %, a rank has {memory:g} GB. Use more ranks, smaller "
                "micro-batches, activation checkpointing, or fewer trained parameters."
            )
        else:
            screen.print(f"Use Trainer(strategy=ParoStrategy('{result.recommended.partition}', group_size={group})).")
    else:
        result = planner.scale(workload, network, memory * GIGABYTE, worlds, collectives)
        screen.print(planner.scaling_table(result))
    make_folders(json, csv, plot)
    if json is not None:
        planner.write_json(result, json)
    if csv is not None:
        planner.write_csv(result, csv)
    if plot is not None:
        _draw(result, plot)


def _links(inter: float | None, intra: float | None, ranks: int, group: int) -> tuple[float, float]:
    """Both bandwidths; one of a link that is not there changes nothing."""
    for name, value, is_there in (("inter", inter, ranks > group), ("intra", intra, group > 1)):
        if value is None and is_there:
            raise ValueError(
                f"{ranks} ranks in groups of {group} need the bandwidth {name}, which is not given. HINT: Gbit/s, as "
                f"`lightning-paro probe` measures it, for example --{name} {80 if name == 'inter' else 2000}."
            )
    known = inter or intra or 1.0
    return inter or known, intra or known


def _count(
    params: float | None, hf: str | None, model: Callable[[], LightningModule] | None
) -> tuple[float, float, float, float]:
    """Numbers of parameters: all, trained, outside of units, of the largest unit."""
    given = {"params": params, "hf": hf, "model": model}
    if sum(value is not None for value in given.values()) != 1:
        raise ValueError(
            f"one of params, hf and model says how large the model is, got "
            f"{' and '.join(name for name, value in given.items() if value is not None) or 'none of them'}. "
            "HINT: for example --params 7e9."
        )
    if params is not None:
        return params, params, 0.0, 0.0
    if hf is not None:
        module = model_of_config(hf, "hf", "give the number of parameters, --params.")
    else:
        module = _lightning(model)
    rest, units = 0, [0]
    for unit in find_units(module, "auto"):
        size = sum(parameter.numel() for _, parameter in unit.parameters)
        if unit.module is None:
            rest += size
        else:
            units.append(size)
    parameters = list(module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), trained, rest, max(units)


def _lightning(build: Callable[[], LightningModule] | None) -> LightningModule:
    assert build is not None
    with torch.device("meta"):
        module = build()
        module.configure_model()
    return module


def _worlds(text: str) -> list[int]:
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"scale={text!r} is not understood: expected FROM:TO, such as 16:4096.") from None
    if not 0 < first <= last:
        raise ValueError(f"scale={text!r}: expected 0 < FROM <= TO.")
    worlds = [first]
    while worlds[-1] * 2 <= last:
        worlds.append(worlds[-1] * 2)
    return worlds


def _draw(result: Plan | list[Plan], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot needs matplotlib. HINT: pip install 'lightning_paro[plots]'.") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    if isinstance(result, list):
        planner.draw_scaling(result, axes)
    else:
        planner.draw(result, axes)
    figure.savefig(path, dpi=150)
