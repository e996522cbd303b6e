"""What layers are weighed by when they are not all equally likely: norms of their weights, or of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_paro.state_access import StateAccess

__all__ = ["GradientNorms", "weight_norms"]

Layers = Sequence[Mapping[str, nn.Parameter]]
"""For each layer its parameters, by name."""

DECAY = 0.9


def weight_norms(access: StateAccess, modules: Sequence[nn.Module | None], layers: Layers) -> list[float]:
    """The norm of each layer's weights; what is no module, like embeddings and head, counts as the mean. Collective."""
    norms = []
    for module, parameters in zip(modules, layers, strict=True):
        if module is None:
            norms.append(float("nan"))
            continue
        with access.full_parameters(module), torch.no_grad():
            squares = torch.stack([p.detach().float().square().sum() for p in parameters.values()])
        norms.append(squares.sum().sqrt().item())
    return _filled(norms)


class GradientNorms:
    """A moving average of the gradient norm of each layer, from the steps in which it is trained.

    Args:
        size: Number of layers.
    """

    def __init__(self, size: int) -> None:
        self._norms = torch.full((size,), float("nan"))

    def observe(self, access: StateAccess, layers: Layers, active: Sequence[int]) -> None:
        """Before a step: take the active layers' gradients into account. Collective; nothing waits for the device."""
        shards = access.trainable_shards()
        squares: dict[int, Tensor] = {}  # of layers that have gradients here
        for index in active:
            gradients = [shards[name].grad for name in layers[index] if name in shards]
            parts = [g.detach().float().square().sum() for g in gradients if g is not None]
            if parts:
                squares[index] = torch.stack(parts).sum()
        if not active:
            return
        device = next((shard.value.device for shard in shards.values()), self._norms.device)
        zero = torch.zeros((), device=device)
        norms = access.reduce_over_shards(torch.stack([squares.get(index, zero) for index in active])).sqrt()
        self._norms = self._norms.to(device)
        for index, norm in zip(active, norms, strict=True):  # one by one: a list of indices would be copied there
            old = self._norms[index]
            new = torch.where(old.isnan(), norm, DECAY * old + (1 - DECAY) * norm)
            # a layer without a gradient, as of a batch that was skipped, was not observed
            self._norms[index] = torch.where(norm.isfinite() & (norm > 0), new, old)

    def scores(self) -> list[float]:
        """By layer; one that was never trained counts as the mean of the others."""
        return _filled(self._norms.tolist())

    def state_dict(self) -> list[float]:
        """To be saved."""
        return self._norms.tolist()

    def load_state_dict(self, norms: list[float]) -> None:
        """What :meth:`state_dict` returned."""
        self._norms = torch.tensor(norms)


def _filled(norms: list[float]) -> list[float]:
    known = [norm for norm in norms if norm == norm]
    mean = sum(known) / len(known) if known else 1.0
    return [norm if norm == norm else mean for norm in norms]
