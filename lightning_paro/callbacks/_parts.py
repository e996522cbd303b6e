"""What LISA draws from, what it always trains, and what never."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import nn

from lightning_paro.algorithms.anatomy import Anatomy
from lightning_paro.algorithms.lisa_memory import ParameterCounts

__all__ = ["Parts", "When"]

When = Literal["always", "sampled", "never"]


class Parts:
    """The trainable parameters of a model, as LISA treats them.

    Args:
        anatomy: The model.
        sizes: Number of elements of each of its parameters, by name, those that are never trained included.
        train_embeddings: When its embeddings are trained.
        train_head: When its head is.

    Attributes:
        names: What is drawn from: layers, by the name of their module, and embeddings and head where they are sampled.
        layers: The parameters of each of those, by name.
        never: What is never trained.
        all: Everything that the user left trainable.

    Raises:
        ValueError: If head and embeddings are one, but are to be treated differently, or are not there at all.
    """

    def __init__(self, anatomy: Anatomy, sizes: Mapping[str, int], train_embeddings: When, train_head: When) -> None:
        self._sizes = sizes
        if anatomy.tied and train_head != train_embeddings:
            raise ValueError(
                f"train_embeddings={train_embeddings!r} and train_head={train_head!r}, but this model's head and "
                "embeddings are one parameter. HINT: give both the same value."
            )
        drawn = {name: dict(parameters) for name, parameters in anatomy.layers.items()}
        self.never: dict[str, nn.Parameter] = {}
        for name, parameters, when in (
            ("embeddings", anatomy.embeddings, train_embeddings),
            ("head", anatomy.head, train_head),
        ):
            if when != "always" and not parameters and not anatomy.tied:
                raise ValueError(
                    f"train_{name}={when!r}, but nothing trainable was found that is {name}: expected an nn.Embedding, "
                    "and as head a linear module that is registered behind the layers. HINT: 'always', if there is "
                    "none; or freeze by hand what is not to be trained."
                )
            if when == "sampled" and parameters:
                drawn[name] = dict(parameters)
            elif when == "never":
                self.never |= parameters
        self.names = list(drawn)
        self.layers: list[Mapping[str, nn.Parameter]] = list(drawn.values())
        every = (*anatomy.layers.values(), anatomy.embeddings, anatomy.head, anatomy.rest)
        self.all: dict[str, nn.Parameter] = {name: p for parameters in every for name, p in parameters.items()}

    def sizes(self) -> dict[str, int]:
        """Number of elements of everything that may be trained, by name."""
        return {name: self._sizes[name] for name in self.all}

    def of(self, indices: Iterable[int]) -> dict[str, nn.Parameter]:
        """The parameters of some layers."""
        return {name: p for index in indices for name, p in self.layers[index].items()}

    def others(self, indices: Iterable[int]) -> dict[str, nn.Parameter]:
        """The parameters of all other layers."""
        chosen = set(indices)
        return self.of(index for index in range(len(self.layers)) if index not in chosen)

    def trainable(self, active: Iterable[int]) -> int:
        """Number of parameters that are trained with some layers."""
        asleep = self.others(active).keys() | self.never.keys()
        return sum(self._sizes[name] for name in self.all if name not in asleep)

    def counts(self) -> ParameterCounts:
        """Numbers of parameters; what never is trained counts in the total only."""
        layers = tuple(sum(self._sizes[name] for name in layer) for layer in self.layers)
        return ParameterCounts(sum(self._sizes.values()), 0, 0, self.trainable(()), layers)
