"""Optimizers as users write them: elementwise ones, and ones that mix elements in one way or another."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, elementwise."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(one * momentum + (1 - one) * p.grad))
                momentum.mul_(two).add_(p.grad, alpha=1 - two)
        return loss


class HeavyBall(Lion):
    """Momentum beside a counter that is a vector of one element, and a number that is of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    count = state.setdefault("count", torch.zeros(1, dtype=p.dtype))
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    count += 1
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] / float(count) * momentum)


class LoggedAdamW(AdamW):
    """A subclass that changes nothing; its step runs the hooks of both classes."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ClippedSGD(SGD):
    """Bounds the norm of all gradients together, which small ones do not reach."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        return super().step(closure)


class Projected(SGD):
    """Takes the part along the values out of a gradient that is nearly orthogonal to them, as AdamP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and torch.cosine_similarity(p.flatten(), p.grad.flatten(), dim=0).abs() < 1e-3:
                    p.grad.mul_(0.5)
        return super().step(closure)


class SlowWeights(SGD):
    """Lookahead in one class: every other step moves all parameters, also those without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["calls"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


class SignedAdamW(AdamW):
    """An elementwise subclass: only the sign of the gradient counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sign_()
        return super().step(closure)


class DecayedAdamW(AdamW):
    """Moves on after the inherited step, and clears the gradients itself."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
        self.zero_grad()
        return loss


class CentredAdamW(AdamW):
    """A mixing subclass: gradient centralisation."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class AttributeMomentum(Lion):
    """Keeps its state in an attribute of its own, made when it is needed."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.momenta.setdefault(p, torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * momentum)


class ExtraGradient(Lion):
    """Needs a closure, and calls it twice: the step is taken with the gradient of a look-ahead point."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        start = [p.clone() for p in parameters]
        for p in parameters:
            p.sub_(0.1 * p.grad)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, before in zip(parameters, start, strict=True):
            p.copy_(before - 0.1 * p.grad)
        return loss


class LayerScaled(Lion):
    """LAMB's idea: an update in proportion to the tensor's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / (p.grad.norm() + 1e-8) * p.grad)


class RowScaled(Lion):
    """Shampoo's idea, diagonal: a preconditioner per row. Of a vector every element is a row: elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = p.grad.reshape(p.shape[0], -1) if p.dim() else p.grad.reshape(1, 1)
                    factor = self.state[p].setdefault("rows", rows.new_zeros(rows.shape[0], 1))
                    factor += rows.square().sum(1, keepdim=True)
                    p.sub_((group["lr"] * rows / (factor.sqrt() + 1e-8)).view_as(p))


class GlobalStep(Lion):
    """One step size from the gradients of all parameters together, as learning-rate-free methods have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([g.square().sum() for g in gradients]).sum().sqrt() if gradients else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / total * p.grad)
