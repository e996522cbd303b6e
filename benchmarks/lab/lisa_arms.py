"""What is measured of LISA: models of public shapes, ways to fine-tune them, and what each holds by the formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.lab.models import Shape
from lightning_paro.algorithms.anatomy import dissect
from lightning_paro.algorithms.lisa_memory import ParameterCounts, bytes_per_parameter, model_state

__all__ = ["ARMS", "SHAPES", "TIMED", "Arm", "Subject", "arms_of", "callback", "claim", "formula", "subject"]


def _llama(width: int, layers: int, heads: int, kv: int, inner: int, length: int, vocab: int) -> Shape:
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": vocab}
    return Shape("llama", length, 1, config | {"max_position_embeddings": length, "tie_word_embeddings": False})


def _gpt2(width: int, layers: int, heads: int, length: int, vocab: int) -> Shape:
    config = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": vocab}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Shape("gpt2", length, 1, config | dropout | {"bos_token_id": 0, "eos_token_id": 0})


SHAPES = {
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, length=1024, vocab=32000),
    "tinyllama": _llama(2048, 22, 32, 4, 5632, length=1024, vocab=32000),
    "gpt2-small": _gpt2(768, 12, 12, length=1024, vocab=50257),
    "tiny": _llama(32, 6, 4, 2, 64, length=16, vocab=64),
    "tiny-gpt2": _gpt2(32, 6, 4, length=16, vocab=64),
}
"""Those named tiny are for a CPU, to see that everything runs."""


@dataclass(frozen=True)
class Arm:
    """A way to fine-tune.

    Attributes:
        text: How it is called in tables.
        rank: Of LoRA, on every linear layer but the head; 0 if there is none.
        lisa: Arguments of the callback, but the interval; None if there is none.
        is_long: Whether it runs for many periods, see :func:`benchmarks.lab.lisa_memory.periods`.
    """

    text: str
    rank: int = 0
    lisa: dict[str, Any] | None = field(default=None, hash=False)
    is_long: bool = False

    @property
    def num_layers(self) -> int:
        return self.lisa["num_layers"] if self.lisa else 0

    @property
    def has_head(self) -> bool:
        """Whether LISA trains a head that is not tied."""
        return self.lisa is not None and self.lisa.get("train_head") != "never"

    @property
    def keeps(self) -> bool:
        """Whether the state of layers that went to sleep stays, as in public code."""
        return self.lisa is not None and self.lisa.get("state_policy") == "keep"


ARMS = {
    "full": Arm("full"),
    **{f"lora_{rank}": Arm(f"LoRA, r = {rank}", rank=rank) for rank in (128, 256, 512)},
    "lisa_e": Arm("LISA, E", lisa={"num_layers": 0, "train_head": "never"}),
    "lisa_eh": Arm("LISA, E+H", lisa={"num_layers": 0}),
    "lisa_2": Arm("LISA, E+H+2 layers", lisa={"num_layers": 2}, is_long=True),
    "lisa_4": Arm("LISA, E+H+4 layers", lisa={"num_layers": 4}),
    "lisa_2_keep": Arm("2 layers, state kept", lisa={"num_layers": 2, "state_policy": "keep"}, is_long=True),
}

TIMED = ("full", "lora_128", "lisa_2")


def arms_of(shape: str) -> list[str]:
    """The arms of a model; one whose head is tied to the embeddings cannot train the one without the other."""
    return [name for name, arm in ARMS.items() if SHAPES[shape].family != "gpt2" or not arm.lisa or arm.has_head]


@dataclass(frozen=True)
class Subject:
    """A model that is ready to be fine-tuned.

    Attributes:
        model: With adapters, if the arm has them.
        layers: Its layers.
        counts: Its numbers of parameters, those of adapters left out.
        adapters: Number of parameters of the adapters.
        head: Elements of the matrix that makes logits, tied or not.
    """

    model: Any
    layers: list[nn.Module]
    counts: ParameterCounts
    adapters: int
    head: int

    def trained(self, arm: Arm) -> int:
        """How many parameters are trained at a time."""
        if arm.lisa is None:
            return self.adapters if arm.rank else self.counts.total
        return self.counts.active(arm.num_layers, head=arm.has_head)


def subject(shape: str, attention: str, arm: Arm, device: torch.device) -> Subject:
    """The model of an arm, the same in every process: random weights in bf16, made on its device, without dropout."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    family, config = SHAPES[shape].family, SHAPES[shape].config
    made = (GPT2Config if family == "gpt2" else LlamaConfig)(**config, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):  # billions of random numbers take a minute on a host
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation=attention).train()
    anatomy = dissect(model)
    counts = ParameterCounts.of(anatomy)
    layers = [model.get_submodule(name) for name in anatomy.layers]
    head = model.get_output_embeddings().weight.numel()
    if arm.rank:
        from peft import LoraConfig, get_peft_model

        is_transposed = family == "gpt2"  # how its linear layers hold their weights
        adapters = LoraConfig(
            r=arm.rank, lora_alpha=arm.rank, target_modules="all-linear", fan_in_fan_out=is_transposed
        )
        with torch.device(device):
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    added = sum(parameter.numel() for parameter in model.parameters()) - counts.total
    return Subject(model, layers, counts, added, head)


def callback(arm: Arm, interval: int) -> list[Any]:
    """The callback of an arm, if it has one."""
    if arm.lisa is None:
        return []
    from lightning_paro.callbacks import LISA

    return [LISA(interval=interval, **arm.lisa)]


def formula(arm: Arm, of: Subject, seen: int) -> int:
    """Bytes of weights, gradients and optimizer state, all bf16; docs/lisa.md derives it.

    Args:
        arm: Who trains.
        of: What it trains.
        seen: How many layers were trained at any time, for who keeps their state.
    """
    sizes = bytes_per_parameter("bf16-true")
    state = model_state(arm.text, of.counts.total + of.adapters, of.trained(arm), sizes)
    asleep = seen - arm.num_layers if arm.keeps else 0
    return state.total + int(sizes.optimizer) * asleep * max(of.counts.layers)


def claim(shape: str, arm: str) -> float:
    """GiB that a process may take of a GPU, at a length of 1024 and one sequence: so several can run at a time.

    Rounded up from the formula and the activations of eager attention.
    """
    full, keep, others = {"llama-2-7b": (80, 56, 42), "tinyllama": (24, 18, 14)}.get(shape, (6, 6, 6))
    return {"full": full, "lisa_2_keep": keep}.get(arm, others)
