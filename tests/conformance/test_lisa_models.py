"""LISA on transformers models: tied heads, adapters, what is sampled or never trained, checkpointed activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from lightning_paro.algorithms.sampling import Draw
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Watch, fit, trained, values
from tests.conformance.test_lisa_refusals import Text, gpt2, llama
from tests.distributed.lisa import Net, table


def in_turn(ask: Draw) -> Sequence[int]:
    """Two neighbours, one further in every period."""
    return [(ask.period + place) % ask.size for place in range(ask.num_layers)]


def _layer(name: str, stack: str) -> int | None:
    """The number of the layer that a parameter is in."""
    head, found, rest = name.partition(f".{stack}.")
    return int(rest.split(".")[0]) if found else None


def _moved(module: LightningModule, before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in module.named_parameters() if not torch.equal(before[name].to(p.dtype), p)}


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
    assert _moved(module, before) == watch.states[0] == watch.trained[0] == inside | rest
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
    assert not ends & (_moved(module, before) | set.union(*watch.gradients, *watch.states))
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
    assert _moved(module, before) == watch.states[-1] == watch.gradients[-1] == active
    assert trained(module) == own
    assert lisa.trainable == sum(before[name].numel() for name in active)


# ---- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", ["always", "never"])
def test_checkpointed_activations_change_nothing(build: Any, embeddings: Any) -> None:
    results = []
    for checkpointed in (False, True):
        module = Text(build())
        if checkpointed:
            module.model.gradient_checkpointing_enable({"use_reentrant": False})
            module.model.disable_input_require_grads()
        lisa = LISA(interval=1, train_embeddings=embeddings, train_head=embeddings)
        fit(lisa, module)
        results.append(values(module))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-12)
    start = Text(build()).double()
    assert len(_moved(start, results[0])) > len(results[0]) * 0.75


class Saved(Net):
    """By batch: bytes that autograd keeps for the backward, weights left out."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weights = {p.untyped_storage().data_ptr() for p in self.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = super().training_step(batch, index)
        self.kept.append(sum(kept.values()))
        return loss


def test_frozen_layers_keep_fewer_activations() -> None:
    """A linear layer that is not trained does not keep its input."""
    _, full = fit(None, build=Saved, count=2)
    _, module = fit(LISA(num_layers=2, interval=1, sampler=table), build=Saved, count=2)
    _, fewer = fit(LISA(num_layers=0, interval=1), build=Saved, count=2)
    assert fewer.kept[0] < module.kept[0] < full.kept[0]
    rows = 8 * 4 * 8  # of a micro-batch, in float64
    assert full.kept[0] - module.kept[0] == 3 * rows * 6
    assert isinstance(full, nn.Module)
