"""``lightning-paro lisa-memory``: what LISA takes of memory for a Hugging Face config, without building it."""

from __future__ import annotations

import csv as csv_module
import json as json_module
import re
from pathlib import Path
from typing import Literal

from lightning_paro.callbacks import LISA
from lightning_paro.cli._hugging_face import model_of_config
from lightning_paro.cli._output import console, make_folders

__all__ = ["lisa_memory"]

OWN_NAMES = {"num_layers=": "layers=", "layers=": "path="}
"""What this verb calls the arguments of :meth:`LISA.memory_report`."""


def lisa_memory(
    *,
    config: str,
    layers: str = "2",
    rank: int = 128,
    precision: Literal["bf16-true", "bf16-mixed", "16-mixed", "32-true", "64-true"] = "bf16-true",
    path: str = "auto",
    json: Path | None = None,
    csv: Path | None = None,
) -> None:
    """Compute the bytes of weights, gradients and optimizer state of full fine-tuning, LISA and LoRA on one device.

    Args:
        config: A Hugging Face config: a folder or config.json, or a name on the Hub.
        layers: Layers that LISA trains at a time, one number or several with commas between.
        rank: Of LoRA's adapters, which are on every linear module of the layers.
        precision: As the Trainer's.
        path: Where the list of layers is in the model, such as model.layers, or several with commas between.
        json: Write bytes and numbers of parameters to this file.
        csv: Write the rows to this file.
    """
    numbers = _numbers(layers)
    model = model_of_config(config, "config", "give that of a model in this version of transformers.")
    where = "auto" if path == "auto" else path.split(",")
    try:
        report = LISA.memory_report(model, numbers, layers=where, precision=precision, rank=rank)
    except ValueError as error:
        own = re.sub(r"\b(num_)?layers=", lambda found: OWN_NAMES[found[0]], str(error))
        raise ValueError(own) from error
    console(100).print(report)
    content = report.to_dict()
    make_folders(json, csv)
    if json is not None:
        json.write_text(json_module.dumps(content, indent=2) + "\n", encoding="utf-8")
    if csv is not None:
        with csv.open("w", newline="", encoding="utf-8") as written:
            writer = csv_module.DictWriter(written, content["rows"][0])
            writer.writeheader()
            writer.writerows(content["rows"])


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise ValueError(f"layers={text!r} is not understood: expected numbers of layers, such as 2,4.") from None
