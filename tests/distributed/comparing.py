"""How two sets of values are compared: every difference is listed, and what is not finite is a difference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

Values = dict[str, np.ndarray]


def values_of(module: nn.Module) -> Values:
    """Parameters (a tied one once) and persistent buffers, in a form that pickles."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: as_array(tensor) for name, tensor in named}


def as_array(tensor: Tensor) -> np.ndarray:
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1  # numpy has none
    return (tensor.float() if is_float8 else tensor).detach().cpu().numpy().copy()


def differences(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float) -> list[str]:
    """Where ``actual`` is further from ``expected`` than ``tolerance`` times the tensor's largest absolute value."""
    found = [f"only on one side: {name}" for name in sorted(actual.keys() ^ expected.keys())]
    for name in sorted(actual.keys() & expected.keys()):
        a, b = np.asarray(actual[name]), np.asarray(expected[name])
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}")
        elif not (np.isfinite(a).all() and np.isfinite(b).all()):  # first: max() hides NaN
            found.append(f"{name}: {np.sum(~np.isfinite(a))} values are not finite, {np.sum(~np.isfinite(b))} expected")
        elif a.size:
            largest = np.abs(b).max()
            error = np.abs(a - b).max() / (largest if largest > 0 else 1)
            if not error <= tolerance:
                found.append(f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}")
    return found if len(found) <= 6 else [*found[:5], f"and {len(found) - 5} more"]
