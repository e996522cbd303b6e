"""One rank of a posed cluster: it joins the others and takes jobs from its standard input until that ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_paro.collectives import ProcessGroups
from lightning_paro.topology import Topology

__all__ = ["Rank", "describe", "ready"]


@dataclass(frozen=True)
class Rank:
    """Where a rank is, and the process groups of the topology "posed hosts"."""

    rank: int
    device: torch.device
    groups: ProcessGroups

    @property
    def topology(self) -> Topology:
        return self.groups.topology

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        """Wait for the device and for all ranks, on the host."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group=self.groups.control)

    def clean(self) -> int:
        """Free what nobody needs any more, and say how many bytes are left on the device."""
        gc.collect()
        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()


def ready(rank: Rank) -> int:
    """All ranks are there."""
    rank.barrier()
    return rank.rank


def describe(rank: Rank) -> dict[str, Any]:
    """The device and the versions of everything that matters to a measurement."""
    import lightning
    import transformers

    import lightning_paro

    versions = {
        "torch": torch.__version__, "lightning": lightning.__version__, "transformers": transformers.__version__,
        "lightning_paro": lightning_paro.__version__, "python": platform.python_version(),
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        versions["deepspeed"] = importlib.import_module("deepspeed").__version__
    if not rank.on_gpu:
        return {"device": f"CPU, {os.cpu_count()} cores", "backend": "gloo", "versions": versions}
    versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    memory = torch.cuda.get_device_properties(rank.device).total_memory
    return {"device": torch.cuda.get_device_name(), "memory_bytes": memory, "backend": "nccl", "versions": versions}


def _join() -> Rank:
    on_gpu = bool(os.environ["CUDA_VISIBLE_DEVICES"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=4))
    topology = Topology(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    return Rank(dist.get_rank(), device, ProcessGroups.create(topology))


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux: no rank outlives who started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    rank = _join()
    for line in sys.stdin:
        job = json.loads(line)
        module, _, name = job["call"].partition(":")
        try:
            result = getattr(importlib.import_module(module), name)(rank, **job["options"])
            replies.write(json.dumps({"result": result}) + "\n")
        except BaseException as error:
            traceback.print_exc()
            message = (str(error).strip() or "no message").splitlines()[0][:300]
            replies.write(json.dumps({"error": type(error).__name__, "message": message}) + "\n")
            os._exit(1)  # others may wait for this rank in a collective: all are ended and started anew
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
