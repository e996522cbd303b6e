"""SμPar with torch.compile, and in every precision of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.algorithms.supar.init import initialize
from lightning_paro.mixins import SuParMixin
from tests.distributed.supar import Net, train

ENDS: dict[str, Any] = {"vocab_size": 11, "bos_token_id": None, "eos_token_id": None, "use_cache": False}


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Writer(SuParMixin, LightningModule):
    """A model of transformers, with its factors in hooks and attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "gpt2":
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            self.model: Any = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, **dropout, **ENDS))
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True, **ENDS))
        plan = {"base_width": 16, "density": 0.5, "init_std": 0.2, "alpha_input": 2.0, "alpha_output": 3.0}
        self.supar_setup(SuParPlan.from_model(self, **plan))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.model(batch).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(1e-2, 0.1))


def _values(module: LightningModule) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value.detach() for name, value in module.named_parameters()}


def _masks(module: LightningModule) -> dict[str, Tensor]:
    state = module.state_dict()
    return {
        name.replace("_orig_mod.", "").removesuffix("_mask"): m for name, m in state.items() if name.endswith("_mask")
    }


def _whole(module: LightningModule) -> LightningModule:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


def _in_place(module: LightningModule) -> LightningModule:
    module.model.compile(backend="aot_eager", fullgraph=True)
    return module


def _around(module: LightningModule) -> LightningModule:
    module.model = torch.compile(module.model, backend="aot_eager", fullgraph=True)
    return module


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("compiled", [_in_place, pytest.param(_whole, marks=pytest.mark.full)])
def test_a_compiled_model_trains_as_it_does_uncompiled(
    kind: str, compiled: Callable[[LightningModule], LightningModule]
) -> None:
    settings: dict[str, Any] = {"precision": "64-true", "steps": 3}
    _, plain = train(build=lambda: Writer(kind), **settings)
    _, module = train(build=lambda: compiled(Writer(kind)), **settings)
    for name, value in _values(plain).items():
        torch.testing.assert_close(_values(module)[name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_a_model_that_is_wrapped_after_set_up_is_refused() -> None:
    with pytest.raises(
        ValueError, match="such as 'model.* are no longer in Writer.*'model._orig_mod.* HINT: .*compile"
    ):
        train(build=lambda: _around(Writer("gpt2")), steps=1)


class Plain(Writer):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_so_it_is_where_param_groups_are_the_users() -> None:
    with pytest.raises(ValueError, match="8 parameters of the plan, such as 'model.transformer.h.0"):
        train(build=lambda: _around(Plain("gpt2")), steps=1)


def test_masks_of_a_model_that_was_wrapped_before_are_the_same() -> None:
    class Wrapped(SuParMixin, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))))
            self.supar_setup(SuParPlan.from_model(self, base_width=8, density=0.5))

    class Bare(SuParMixin, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
            self.supar_setup(SuParPlan.from_model(self, base_width=8, density=0.5))

    one, other = Wrapped(), Bare()
    assert len(_masks(other)) == 2
    assert all(torch.equal(mask, _masks(one)[name]) for name, mask in _masks(other).items())
    assert all(torch.equal(value, _values(one)[name]) for name, value in _values(other).items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_masked_weights_and_moments_stay_zero_in_every_precision(precision: Any) -> None:
    trainer, module = train(build=lambda: Writer("gpt2"), precision=precision, steps=3)
    masks, values = _masks(module), _values(module)
    assert masks
    state = trainer.optimizers[0].state
    for name, mask in masks.items():
        assert not values[name][~mask].any(), name
        assert values[name][mask].all(), name
        moments = [value for value in state[module.get_parameter(name)].values() if value.shape == mask.shape]
        assert len(moments) == 2
        assert not any(moment[~mask].any() for moment in moments), name


def test_initial_values_do_not_depend_on_the_default_dtype() -> None:
    one = Net()
    for dtype in (torch.float64, torch.bfloat16):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            other = Net()
        finally:
            torch.set_default_dtype(before)
        for name, value in one.named_parameters():
            assert torch.equal(other.get_parameter(name), value.to(dtype)), name
        assert all(torch.equal(mask, _masks(other)[name]) for name, mask in _masks(one).items())


def test_initial_values_do_not_depend_on_the_default_device() -> None:
    """Lightning calls configure_model with the accelerator as default, for which the meta device stands here."""
    one, other = Net(), Net(seed=2)
    plan = one.supar_plan
    assert plan is not None
    with torch.device("meta"):
        initialize(other, plan)
        masks = {name: plan.mask(name) for name in plan.sparse}
    assert all(torch.equal(one.get_parameter(name), value) for name, value in other.named_parameters())
    assert all(torch.equal(masks[name.removesuffix("_mask")], mask) for name, mask in _masks(one).items())
