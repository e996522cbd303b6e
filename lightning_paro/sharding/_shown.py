"""What the module's parameters show: their values, a ghost of them, or values that are still under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_paro.sharding._ghost import nan_ghost, pending_class, released_class

__all__ = ["Shown"]


class Shown:
    """The parameters of one flat buffer, in its order. Everything here is done for all of them, often: keep it lean.

    Args:
        names: Names of the parameters in the root module.
        parameters: The module's own parameters.
        unit: Name of their unit, for messages.
    """

    def __init__(self, names: list[str], parameters: list[nn.Parameter], unit: str) -> None:
        self.parameters = parameters
        self.views: list[Tensor] = []
        """Where their values lie in the flat buffer."""
        self._names = names
        self._unit = unit
        self._own = [type(parameter) for parameter in parameters]
        self._versions: list[int] = []
        self._ghosts: list[Tensor] = []
        self._released: list[type] = []
        self._pending: list[type] = []

    def prepare_release(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the ghosts that :meth:`nothing` shows, in the dtype of the values."""
        self._ghosts = [nan_ghost(parameter.shape, dtype, device) for parameter in self.parameters]
        self._released = [
            released_class(parameter, f"parameter '{name}' of unit '{self._unit}'")
            for name, parameter in zip(self._names, self.parameters, strict=True)
        ]

    def values(self) -> None:
        """Show the values in the flat buffer."""
        for parameter, own, view in zip(self.parameters, self._own, self.views, strict=True):
            parameter.__class__ = own
            parameter.data = view  # not a Parameter made of the view: that would share its version counter

    def nothing(self) -> None:
        """Show ghosts that keep shape, dtype and identity."""
        for parameter, ghost, released in zip(self.parameters, self._ghosts, self._released, strict=True):
            parameter.data = ghost
            parameter.__class__ = released

    def others(self, values: Iterator[Tensor]) -> None:
        """Show other tensors, without gradients."""
        for parameter, own, value in zip(self.parameters, self._own, values, strict=True):
            parameter.__class__ = own
            parameter.grad = None
            parameter.data = value

    def pending(self, settle: Callable[[], None]) -> None:
        """Whoever looks at one of the parameters calls ``settle`` first, which ends this by :meth:`settled`."""
        if not self._pending:
            self._pending = [pending_class(parameter, settle) for parameter in self.parameters]
        for parameter, pending in zip(self.parameters, self._pending, strict=True):
            parameter.__class__ = pending

    def settled(self) -> None:
        """The parameters' own classes again."""
        for parameter, own in zip(self.parameters, self._own, strict=True):
            parameter.__class__ = own

    def note_versions(self) -> None:
        """What has been written up to now is known."""
        self._versions = [parameter._version for parameter in self.parameters]

    def is_written(self) -> bool:
        """Whether somebody wrote to a parameter in place, or gave it other memory."""
        return any(
            parameter._version != version or not parameter.is_set_to(view)
            for parameter, version, view in zip(self.parameters, self._versions, self.views, strict=True)
        )

    def unalias(self) -> None:
        """Give what a user assigned to the ``data`` of a parameter memory of its own: it may be another one's."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if not parameter.is_set_to(view):
                parameter.data = parameter.detach().clone()

    def collect(self) -> None:
        """Bring what a user assigned to the ``data`` of a parameter back into the flat buffer."""
        pairs = zip(self.parameters, self.views, strict=True)
        moved = [(parameter, view) for parameter, view in pairs if not parameter.is_set_to(view)]
        values = [parameter.detach().clone() for parameter, _ in moved]  # which may lie in another one's view
        for (_, view), value in zip(moved, values, strict=True):
            view.copy_(value)
        if moved:
            self.values()
