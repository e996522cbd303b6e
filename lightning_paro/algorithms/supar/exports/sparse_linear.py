"""Masked linear layers with compressed weights: CSR of any mask, BSR of one of squares."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_paro.algorithms.supar.exports.fold import is_linear
from lightning_paro.algorithms.supar.roles import is_transposed

__all__ = ["SparseLinear", "compress", "masked_layers", "put", "weight_of"]


class SparseLinear(nn.Module):
    """A linear layer for inference whose weight is kept as CSR, or as BSR where a block is given.

    Indices and values are buffers, so it can be moved, cast, copied and saved as any module.

    Args:
        weight: ``(out, in)``; what is not zero is kept.
        bias: ``(out,)`` or None.
        block: Side of the squares of BSR.
    """

    crow: Tensor
    col: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, block: int | None = None) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse (CSR|BSR) tensor support is in beta")
            sparse = weight.to_sparse_csr() if block is None else weight.to_sparse_bsr((block, block))
        self.out_features, self.in_features = weight.shape
        self.layout = sparse.layout
        self.register_buffer("crow", sparse.crow_indices().int())
        self.register_buffer("col", sparse.col_indices().int())
        self.register_buffer("values", sparse.values())
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The weight, ``(out, in)``, a sparse tensor made of the buffers."""
        return torch.sparse_compressed_tensor(
            self.crow, self.col, self.values, size=(self.out_features, self.in_features), layout=self.layout,
            check_invariants=False,
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``(*, in)`` to ``(*, out)``."""
        return nn.functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What print shows."""
        kind = "CSR" if self.layout is torch.sparse_csr else "BSR"
        density = self.values.numel() / (self.in_features * self.out_features)
        return f"{self.in_features}, {self.out_features}, {kind}, density={density:.4g}"


def masked_layers(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """The linear layers that have a masked weight, by the layer's name.

    What multiplies with its weight in another way, such as nn.MultiheadAttention, is left dense, with a warning.

    Args:
        model: The model.
        names: Of the masked parameters.

    Raises:
        ValueError: If there is no such layer.
    """
    owners = {name.rpartition(".")[0]: name for name in names}
    found = {own: part for own in owners if is_linear(part := model.get_submodule(own))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has {len(names)} masked parameters, and none is the weight of an nn.Linear. HINT: "
            "to='dense'."
        )
    if left := [name for own, name in owners.items() if own not in found]:
        warnings.warn(
            f"{len(left)} of {len(names)} masked parameters stay dense, such as '{left[0]}': only nn.Linear and "
            "transformers' Conv1D are replaced.",
            stacklevel=4,
        )
    return found


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as ``(out, in)``, also where it is kept transposed."""
    weight: Tensor = layer.weight.detach()  # type: ignore[operator]
    return weight.t().contiguous() if is_transposed(layer) else weight


def compress(model: nn.Module, names: list[str], block: int | None = None) -> None:
    """Replace masked linear layers of a model by :class:`SparseLinear`.

    Raises:
        ValueError: If there is none, or the dtype is not supported.
    """
    layers = masked_layers(model, names)
    name, first = next(iter(layers.items()))
    weight = weight_of(first)
    if weight.device.type == "cpu" and weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"'{name}.weight' is {weight.dtype} on the CPU; expected float32 or float64, as sparse products need "
            "there. HINT: module.float(), or move it to CUDA before."
        )
    put(model, {part: SparseLinear(weight_of(part), _bias(part), block) for part in layers.values()})


def put(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules, everywhere they are used."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is not None and child in new:
                module._modules[name] = new[child]
                if isinstance(module, nn.TransformerEncoderLayer):
                    module.activation_relu_or_gelu = 0  # else in eval mode it reads the weights and calls a kernel


def _bias(layer: nn.Module) -> Tensor | None:
    bias = layer.bias
    return bias.detach().clone() if isinstance(bias, Tensor) else None
