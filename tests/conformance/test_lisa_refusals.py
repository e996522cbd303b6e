"""Where LISA cannot be right it refuses, in words that say what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from transformers import AlbertConfig, AlbertForMaskedLM

from lightning_paro.callbacks import LISA
from lightning_paro.callbacks._lisa_checks import check_trainer
from tests.conformance.lisa_models import Text, gpt2
from tests.conformance.lisa_runs import fit, quiet
from tests.distributed.lisa import Net


def _trainer_with(strategy: Any) -> Trainer:
    """A Trainer whose strategy cannot be set up here."""
    trainer = quiet()
    trainer._accelerator_connector.strategy = strategy
    return trainer


def test_deepspeed() -> None:
    strategy = object.__new__(DeepSpeedStrategy)  # without the library there is no other way to one
    with pytest.raises(ValueError, match="cannot run under DeepSpeedStrategy.*HINT: Trainer.strategy='paro_nng'"):
        check_trainer(_trainer_with(strategy))


def test_a_static_graph() -> None:
    with pytest.raises(ValueError, match="static_graph=True says that .* never changes. HINT: DDPStrategy.. without"):
        check_trainer(_trainer_with(DDPStrategy(static_graph=True)))
    check_trainer(_trainer_with(DDPStrategy(static_graph=False)))


@pytest.mark.parametrize(
    "state", [PowerSGDState(None), PostLocalSGDState(None, None, 10)], ids=lambda s: type(s).__name__
)
def test_hooks_that_remember(state: Any) -> None:
    message = f"{type(state).__name__} makes up for what it did not send in later steps.* HINT: a ddp_comm_hook without"
    with pytest.raises(ValueError, match=message):
        check_trainer(_trainer_with(DDPStrategy(ddp_comm_state=state, ddp_comm_hook=lambda state, bucket: None)))


def test_fsdp_with_merged_parameters() -> None:
    with pytest.raises(ValueError, match="use_orig_params=False. merges .* HINT: leave use_orig_params out"):
        check_trainer(_trainer_with(FSDPStrategy(use_orig_params=False)))
    check_trainer(_trainer_with(FSDPStrategy()))


def test_another_callback_that_freezes() -> None:
    with pytest.raises(ValueError, match="LISA and BackboneFinetuning both freeze .* HINT: use one"):
        fit(LISA(interval=1), callbacks=[BackboneFinetuning()])


def test_two_of_them() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `LISA`"):
        quiet(callbacks=[LISA(layers="generator"), LISA(layers="judge")])


# ---- optimizers -----------------------------------------------------------------------------------------------------


class Chosen(Net):
    """Optimizers for some of the parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if "layers.1" not in name], lr=0.1)


class Twice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)]


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            Chosen,
            r"no param groups hold 'layers.1.inner.weight' \(2 more are wrong\), .*; expected one. HINT: give all",
        ),
        (Twice, r"2 param groups hold 'head.weight' \(1 more are wrong\)"),
        (NoOptimizer, r"no param groups hold 'layers.0.inner.weight' \(19 more are wrong\)"),
    ],
)
def test_a_parameter_in_no_or_two_param_groups(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(LISA(interval=1), build=build)


class Eager(torch.optim.SGD):
    """Makes state for all of its parameters when it first steps, whether they have a gradient or not."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)
        super().step()
        return loss


class WithEager(Net):
    def configure_optimizers(self) -> Any:
        return Eager(self.parameters(), lr=0.1)


@pytest.mark.parametrize("policy", ["drop_frozen", "reset_all"])
def test_an_optimizer_that_makes_state_without_gradients(policy: Any) -> None:
    message = r"the optimizer holds state of 'layers.\d.inner.weight' and 8 more, which LISA has frozen.*HINT"
    with pytest.raises(RuntimeError, match=message):
        fit(LISA(interval=2, state_policy=policy), build=WithEager)
    fit(LISA(interval=2, state_policy="keep"), build=WithEager)


class WithLbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_with_one_state_for_all() -> None:
    with pytest.raises(ValueError, match="LBFGS keeps one vector for all parameters.* HINT: .* such as AdamW"):
        fit(LISA(interval=2), build=WithLbfgs)


class Unfreezes(Net):
    """As GANs written by hand do."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.layers.requires_grad_(True)
        return super().training_step(batch, index)


@pytest.mark.parametrize("policy", ["drop_frozen", "keep"])
def test_a_module_that_unfreezes_what_lisa_froze(policy: Any) -> None:
    message = (
        r"LISA has frozen 'layers.\d.inner.weight' and 8 more, and now it requires a gradient.* HINT: .*toggle_opt"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(LISA(interval=2, state_policy=policy), build=Unfreezes)


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [("always", "never"), ("never", "sampled"), ("sampled", "always")], ids=str)
def test_a_tied_head_cannot_be_treated_apart(pair: Any) -> None:
    message = "but this model's head and embeddings are one parameter. HINT: give both the same value"
    with pytest.raises(ValueError, match=message):
        fit(LISA(interval=1, train_embeddings=pair[0], train_head=pair[1]), Text(gpt2()))


def test_layers_that_are_one() -> None:
    config = AlbertConfig(
        vocab_size=11, embedding_size=4, hidden_size=8, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no list of the 4 layers of its config: where they share .* HINT"):
        fit(LISA(interval=1), Text(AlbertForMaskedLM(config)))
