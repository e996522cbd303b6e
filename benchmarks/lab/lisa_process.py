"""A fresh process for one or more measurements, told as JSON; each result is a line of JSON as soon as it is there."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lab import lisa_memory, lisa_time

__all__ = ["MEASURES"]

MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "memory": lisa_memory.measure,
    "time": lisa_time.measure,
    "profile": lisa_time.measure_profile,
}


def attempt(device: torch.device, measure: str, **options: Any) -> dict[str, Any]:
    """The result of a measurement, with ``status``: whether there is any."""
    try:
        return MEASURES[measure](device, **options) | {"status": "ok"}
    except torch.OutOfMemoryError:
        return {"status": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        told = (str(error).strip() or "no message").splitlines()[0]
        return {"status": f"{type(error).__name__}: {told[:300]}"}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    task = json.loads(sys.argv[1])
    device = torch.device(task["device"])
    for options in task["runs"]:
        row = options | attempt(device, **options)
        replies.write(json.dumps(row) + "\n")
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
