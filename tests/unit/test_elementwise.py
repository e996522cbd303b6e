"""Which optimizers may work on shards: the self-test is right about them and leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._pytree import tree_flatten
from transformers.optimization import Adafactor

from lightning_paro.sharding._elementwise import check_elementwise, moves_without_gradient
from tests.custom_optimizers import (
    AttributeMomentum,
    CentredAdamW,
    ClippedSGD,
    ExtraGradient,
    GlobalStep,
    LayerScaled,
    Lion,
    LoggedAdamW,
    Projected,
    RowScaled,
    SignedAdamW,
    SlowWeights,
)


def _parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes or ((4, 3), (5,), ())]


class PerOption(Lion):
    """Mixes in the groups that say so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad.mean() if group.get("mix") else p.grad))


class NoisyStep(Lion):
    """Langevin noise, from the global generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p))


class OnlyMatrices(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise TypeError("parameters must be matrices")
        return super().step(closure)


class OnlyFilledGroups(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_sub_(group["params"], torch._foreach_mul([p.grad for p in group["params"]], group["lr"]))


class OnlyFloat32(Lion):
    """As fused kernels of other libraries are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(p.dtype is not torch.float32 for group in self.param_groups for p in group["params"]):
            raise TypeError("float32 only")
        return super().step(closure)


class OnlyFloat32Mixing(LayerScaled):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(p.dtype is not torch.float32 for group in self.param_groups for p in group["params"]):
            raise TypeError("float32 only")
        return super().step(closure)


class NeedsAClosure(Lion):
    """Though the signature leaves it optional."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        return super().step(closure)


class Idle(Lion):
    def step(self, closure: Any = None) -> Any:
        return None


class AccumulatorAdagrad(torch.optim.Adagrad):
    """Has state from the start, which its step relies on."""


@pytest.mark.parametrize(
    "kind",
    [
        Lion,
        LoggedAdamW,
        SignedAdamW,
        AttributeMomentum,
        ExtraGradient,
        AccumulatorAdagrad,
        OnlyFloat32,
        NeedsAClosure,
    ],
)
def test_an_unknown_elementwise_optimizer_passes(kind: type[Optimizer]) -> None:
    check_elementwise(kind(_parameters(), lr=1e-3))


@pytest.mark.parametrize(
    "kind", [CentredAdamW, LayerScaled, RowScaled, GlobalStep, NoisyStep, OnlyFloat32Mixing, ClippedSGD, Projected]
)
def test_an_unknown_mixing_optimizer_is_refused(kind: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} mixes elements .* after \d+ steps.*HINT.*paro_nnn"):
        check_elementwise(kind(_parameters(), lr=1e-3))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.optim.LBFGS(_parameters()), "LBFGS builds a curvature estimate"),
        (lambda: torch.optim.Muon(_parameters((4, 3))), "Muon orthogonalises whole matrices"),
        (lambda: torch.optim.Adafactor(_parameters()), "Adafactor factors the second moment"),
        (lambda: Adafactor(_parameters()), "Adafactor factors the second moment"),
        (lambda: type("MyMuon", (torch.optim.Muon,), {})(_parameters((4, 3))), "MyMuon orthogonalises"),
        (lambda: torch.optim.SparseAdam(_parameters()), "SparseAdam works on sparse gradients"),
    ],
)
def test_a_known_mixing_optimizer_is_refused_by_name(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*HINT: use an elementwise optimizer .*paro_nnn"):
        check_elementwise(make())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OnlyMatrices, "on a small tensor failed with TypeError: parameters must be matrices"),
        (OnlyFilledGroups, "with empty param groups, as on a rank .* failed with RuntimeError"),
        (Idle, r"on a small tensor moved that by 0\.0 in \d+ steps"),
    ],
)
def test_an_optimizer_that_cannot_be_tried_is_refused_with_what_happened(kind: type[Optimizer], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is not known to be elementwise, and trying it {reason}"):
        check_elementwise(kind(_parameters()))


def test_the_options_of_every_group_are_tried() -> None:
    one, two, three = _parameters()
    check_elementwise(PerOption([{"params": [one, two]}, {"params": [three], "lr": 0.5}]))
    with pytest.raises(ValueError, match="PerOption mixes"):
        check_elementwise(PerOption([{"params": [one, two]}, {"params": [three], "mix": True}]))


@pytest.mark.parametrize("kind", [Lion, LayerScaled])
@pytest.mark.parametrize("rate", [0.0, 1e-12, torch.tensor(0.0)])
def test_a_learning_rate_of_zero_hides_nothing(kind: type[Optimizer], rate: float) -> None:
    """Warm-up starts at zero, where every optimizer looks alike."""
    if kind is Lion:
        check_elementwise(Lion(_parameters(), lr=rate))
    else:
        with pytest.raises(ValueError, match="mixes"):
            check_elementwise(kind(_parameters(), lr=rate))


def test_a_scheduler_that_wrapped_step_hides_nothing() -> None:
    """A scheduler replaces ``optimizer.step`` by a function that is bound to the optimizer it was made for."""
    optimizer = LayerScaled(_parameters(), lr=0.1)
    LambdaLR(optimizer, lambda step: step / 10)
    with pytest.raises(ValueError, match="LayerScaled mixes"):
        check_elementwise(optimizer)


@pytest.mark.parametrize("kind", [Lion, LoggedAdamW, AttributeMomentum, AccumulatorAdagrad, CentredAdamW, NoisyStep])
def test_the_self_test_leaves_no_trace(kind: type[Optimizer]) -> None:
    parameters = _parameters()
    optimizer = kind([{"params": parameters[:1], "lr": 0.3}, {"params": parameters[1:]}], lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    scheduler = (
        OneCycleLR(optimizer, 0.1, total_steps=10) if issubclass(kind, AdamW) else LambdaLR(optimizer, lambda step: 1.0)
    )
    optimizer.step()
    usual = fired[:]  # twice where the step of the base class has hooks too
    fired.clear()

    def trace() -> Any:
        groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
        momenta = {id(p): value for p, value in getattr(optimizer, "momenta", {}).items()}
        return copy.deepcopy(
            [
                optimizer.state_dict(), groups, optimizer.defaults, momenta, scheduler.state_dict(), parameters,
                [p.grad for p in parameters], torch.get_rng_state(), sorted(vars(optimizer)), optimizer._opt_called,
            ]
        )  # fmt: skip

    before, step = trace(), optimizer.step
    try:
        check_elementwise(optimizer)
    except ValueError:
        assert kind in (CentredAdamW, NoisyStep)
    assert _same(trace(), before)
    assert optimizer.step is step
    assert not fired
    optimizer.step()
    assert fired == usual
    scheduler.step()


def _same(one: Any, other: Any) -> bool:
    (ones, kind), (others, other_kind) = tree_flatten(one), tree_flatten(other)
    return kind == other_kind and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ones, others, strict=True)
    )


def test_an_attribute_that_leads_back_to_the_optimizer_is_copied_with_it() -> None:
    optimizer = Lion(_parameters())
    optimizer.scheduler = LambdaLR(optimizer, lambda step: 1.0)
    check_elementwise(optimizer)
    assert optimizer.scheduler.optimizer is optimizer


def test_who_moves_parameters_without_a_gradient_is_known() -> None:
    assert moves_without_gradient(SlowWeights(_parameters(), lr=0.1))
    for kind in (AdamW, Lion, LoggedAdamW, AttributeMomentum, NeedsAClosure):
        assert not moves_without_gradient(kind(_parameters(), lr=0.1)), kind
