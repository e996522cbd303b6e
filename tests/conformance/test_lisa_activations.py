"""LISA with checkpointed activations: as without, and refused where nothing would be trained."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_models import Text, gpt2, llama
from tests.conformance.lisa_runs import fit, moved, values
from tests.distributed.lisa import Net, table

REENTRANT = r"activation checkpointing with use_reentrant=True .* HINT: .*\"use_reentrant\": False"


def _checkpointed(model: nn.Module, reentrant: bool = True, hooked: bool = False) -> nn.Module:
    """With the hook through which transformers lets the embeddings' output require a gradient, or without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a newer name for it
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if not hooked:
        model.disable_input_require_grads()
    return model


@pytest.mark.parametrize("when", ["never", "sampled"])
def test_reentrant_checkpointing_behind_embeddings_that_may_be_frozen(when: Any) -> None:
    with pytest.raises(ValueError, match=REENTRANT):
        fit(LISA(interval=1, train_embeddings=when), Text(_checkpointed(llama())))
    fit(LISA(interval=1, train_embeddings=when), Text(_checkpointed(llama(), reentrant=False)))
    fit(LISA(interval=1), Text(_checkpointed(llama())))


def test_reentrant_checkpointing_behind_embeddings_that_the_user_froze() -> None:
    model = _checkpointed(llama())
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(ValueError, match=REENTRANT):
        fit(LISA(interval=1), Text(model))


def test_reentrant_checkpointing_is_right_where_transformers_makes_inputs_require_a_gradient() -> None:
    """As its models of text do, with PEFT and without."""
    results = []
    for reentrant in (False, True):
        module = Text(_checkpointed(llama(), reentrant, hooked=True))
        fit(LISA(interval=1, train_embeddings="never"), module)
        results.append(values(module))
    start = values(llama().double())
    assert sum(not torch.equal(p, start[name.removeprefix("model.")]) for name, p in results[0].items()) > 9 * 2
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-12)


def test_reentrant_checkpointing_by_torchs_wrapper() -> None:
    def build() -> Net:
        net = Net()
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
        net.layers = nn.ModuleList(wrap(layer) for layer in net.layers)
        return net

    with pytest.raises(ValueError, match=REENTRANT):
        fit(LISA(interval=1, train_embeddings="never"), build=build)


def test_reentrant_checkpointing_where_peft_makes_inputs_require_a_gradient() -> None:
    """Is no reason to refuse: adapters are trained."""
    model = get_peft_model(_checkpointed(llama(), hooked=True), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    module = Text(model)
    before = {name: p.detach().clone() for name, p in module.named_parameters() if "lora_B" in name}
    fit(LISA(num_layers=4, interval=1), module, precision="32-true")
    assert len(before) == 8
    assert not any(torch.equal(p, module.get_parameter(name)) for name, p in before.items())


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
    assert len(moved(start, results[0])) > len(results[0]) * 0.75


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
