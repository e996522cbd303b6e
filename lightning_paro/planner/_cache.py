"""A network is measured once: the result is kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_paro.collectives import ProcessGroups
from lightning_paro.planner._probe import LINKS, Probe, Sample, probe
from lightning_paro.topology import Topology

__all__ = ["cached_probe"]


def cached_probe(groups: ProcessGroups, device: torch.device | str = "cpu", fresh: bool = False) -> Probe:
    """What :func:`probe` measures, or measured before between the same hosts. Collective.

    It is kept by host names, kind of device, topology, versions and the environment variables of NCCL and gloo, in
    ``$XDG_CACHE_HOME/lightning_paro``, or in ``~/.cache/lightning_paro``, of rank 0. A file that cannot be read is
    ignored, with a warning. That a link became faster or slower since then is not noticed: measure ``fresh``.

    Args:
        groups: The process groups.
        device: Where tensors live.
        fresh: Measure again.
    """
    device = torch.device(device)
    if groups.control is None:
        return probe(groups, device)  # one rank: no links
    key = _key(groups, device)
    box: list[Probe | None] = [_read(key) if groups.rank == 0 and not fresh else None]
    dist.broadcast_object_list(box, src=0, group=groups.control)
    known = box[0]
    if known is None:
        known = probe(groups, device)
        if groups.rank == 0:
            _write(key, known)
    return known


def _key(groups: ProcessGroups, device: torch.device) -> dict[str, Any]:
    """What a measurement depends on. Collective."""
    everyone: list[Any] = [None] * groups.topology.world_size
    here = os.environ.get("NCCL_HOSTID") or socket.gethostname()  # who shares a host, for NCCL
    ways = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))}
    for name in ("NCCL_HOSTID", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        ways.pop(name, None)
    dist.all_gather_object(everyone, (here, sorted(ways.items())), group=groups.control)
    hosts, settings = zip(*everyone, strict=True)
    on_gpu = device.type == "cuda"
    return {
        "hosts": list(hosts),
        "settings": [[list(setting) for setting in rank] for rank in settings],
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "links": list(LINKS),
        "group_size": groups.topology.group_size,
        "groups": [list(group) for group in groups.topology.groups],
        "backend": dist.get_backend(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }


def _path(key: dict[str, Any]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(base) / "lightning_paro" / f"network-{name}.json"


def _read(key: dict[str, Any]) -> Probe | None:
    path = _path(key)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("it is of other hosts")
        measured = content["probe"]
        samples = tuple(Sample(**sample) for sample in measured["samples"])
        return Probe(Topology(**measured["topology"]), measured["device"], samples)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"the measured network in {path} cannot be used ({error!r}): measuring again.", stacklevel=2)
        return None


def _write(key: dict[str, Any], measured: Probe) -> None:
    """Whole or not at all: another run may read it at this moment."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump({"key": key, "probe": asdict(measured)}, file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"the measured network cannot be kept in {path} ({error!r}).", stacklevel=2)
