"""LISA on transformers models: tied heads, adapters, what is sampled or never trained, checkpointed activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

from lightning_paro.algorithms.sampling import Draw
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_models import Text, gpt2, llama
from tests.conformance.lisa_runs import Watch, fit, moved, trained, values


def in_turn(ask: Draw) -> Sequence[int]:
    """Two neighbours, one further in every period."""
    return [(ask.period + place) % ask.size for place in range(ask.num_layers)]


def _layer(name: str, stack: str) -> int | None:
    """The number of the layer that a parameter is in."""
    head, found, rest = name.partition(f".{stack}.")
    return int(rest.split(".")[0]) if found else None


@pytest.mark.parametrize(
    ("build", "stack", "outside"),
    [
        (gpt2, "h", {"model.transformer.wte.weight", "model.transformer.wpe.weight"}),
        (llama, "layers", {"model.model.embed_tokens.weight", "model.lm_head.weight"}),
    ],
    ids=["gpt2", "llama"],
)
def test_exactly_what_is_active_moves(build: Any, stack: str, outside: set[str]) -> None:
    """Also layers made of Conv1D, and a head that is the embeddings."""
    watch = Watch()
    module = Text(build())
    before = values(module)
    lisa = LISA(num_layers=2, interval=10, sampler=in_turn)
    fit(lisa, module, callbacks=[watch])
    inside = {name for name in before if _layer(name, stack) in (0, 1)}
    rest = {name for name in before if _layer(name, stack) is None}
    assert outside < rest
    assert moved(module, before) == watch.states[0] == watch.trained[0] == inside | rest
    assert lisa.trainable == sum(before[name].numel() for name in inside | rest)
    assert len(lisa.names) == 4


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_embeddings_and_head_never(build: Any) -> None:
    module = Text(build())
    before = values(module)
    watch = Watch()
    fit(LISA(interval=1, train_embeddings="never", train_head="never"), module, callbacks=[watch])
    ends = {name for name in before if any(end in name for end in ("wte", "wpe", "embed_tokens", "lm_head"))}
    assert ends
    assert not ends & (moved(module, before) | set.union(*watch.gradients, *watch.states))
    assert trained(module) == set(before)


@pytest.mark.parametrize(("build", "more"), [(gpt2, ["embeddings"]), (llama, ["embeddings", "head"])])
def test_embeddings_and_head_sampled(build: Any, more: list[str]) -> None:
    module, watch = Text(build()), Watch()
    lisa = LISA(num_layers=1, interval=1, sampler=in_turn, train_embeddings="sampled", train_head="sampled")
    fit(lisa, module, callbacks=[watch])
    assert lisa.names[-len(more) :] == more
    assert len(lisa.names) == 4 + len(more)
    embeddings = {name for name in values(module) if any(end in name for end in ("wte", "wpe", "embed_tokens"))}
    for step, (number, _, active) in enumerate(lisa.periods):
        assert active == (number % len(lisa.names),)
        assert (embeddings <= watch.states[step]) == (lisa.names[active[0]] == "embeddings")
        assert bool(embeddings & watch.states[step]) == (lisa.names[active[0]] == "embeddings")


def test_two_stacks_are_one_pool() -> None:
    config = T5Config(
        vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=3, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    module, watch = Text(T5ForConditionalGeneration(config)), Watch()
    lisa = LISA(num_layers=2, interval=1, sampler=in_turn)
    fit(lisa, module, callbacks=[watch])
    stacks = ("encoder", "decoder")
    assert lisa.names == [f"model.{stack}.block.{index}" for stack in stacks for index in range(3)]
    assert watch.gradients == watch.states == watch.trained
    assert [len(active) for _, _, active in lisa.periods] == [2] * 8


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "stack", "targets", "adapters"),
    [(llama, "layers", ["q_proj", "up_proj"], 4), (gpt2, "h", ["c_attn", "c_proj"], 6)],
    ids=["llama", "gpt2"],
)
@pytest.mark.parametrize("policy", ["drop_frozen", "keep"])
def test_only_the_adapters_of_drawn_layers_train(
    build: Any, stack: str, targets: list[str], adapters: int, policy: Any
) -> None:
    config = LoraConfig(r=2, target_modules=targets, fan_in_fan_out=stack == "h", init_lora_weights=False)
    module, watch = Text(get_peft_model(build(), config)), Watch()
    before = values(module)
    own = trained(module)
    lisa = LISA(num_layers=2, interval=10, sampler=in_turn, state_policy=policy)
    fit(lisa, module, callbacks=[watch], precision="32-true")
    active = {name for name in own if _layer(name, stack) in (0, 1)}
    assert len(active) == 2 * adapters
    assert len(own) == 4 * adapters
    assert all("lora_" in name for name in active)
    assert moved(module, before) == watch.states[-1] == watch.gradients[-1] == active
    assert trained(module) == own
    assert lisa.trainable == sum(before[name].numel() for name in active)
