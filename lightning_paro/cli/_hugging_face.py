"""The model of a Hugging Face config, on the meta device."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["model_of_config"]


def model_of_config(name: str, option: str, hint: str) -> nn.Module:
    """Build the model of a config without memory for its parameters.

    Args:
        name: A folder, a config.json, or a name on the Hub.
        option: Name of the option that it was given by, for messages.
        hint: What to do if no model can be built.

    Raises:
        FileNotFoundError: If it is a path, and nothing is there.
        ValueError: If no model can be built from it.
    """
    from transformers import AutoConfig

    path = Path(name)
    if path.name == "config.json" and not path.is_file():
        raise FileNotFoundError(
            f"{option}={name!r}: there is no such file. HINT: a folder that holds config.json will do."
        )
    if (path.is_absolute() or len(path.parts) > 2) and not path.exists():  # names on the Hub have two parts at most
        raise FileNotFoundError(f"{option}={name!r}: there is no such folder. HINT: give one that holds config.json.")
    folder = path.parent if path.name == "config.json" else name
    try:
        with torch.device("meta"):
            return _described(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except Exception as error:
        raise ValueError(
            f"{option}={name!r}: no model can be built from this config: {' '.join(str(error).split())} HINT: {hint}"
        ) from error


def _described(config: Any) -> nn.Module:
    """The model of a config, of the class that it names; if it names none, a language model, if there is one."""
    import transformers

    module: nn.Module
    for name in config.architectures or []:
        kind: Any = getattr(transformers, str(name), None)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model and kind.config_class is type(config):
            module = kind(config)
            return module
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        with suppress(ValueError):  # there is none of this family
            module = auto.from_config(config)  # type: ignore[no-untyped-call]
            return module
    module = transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    return module
