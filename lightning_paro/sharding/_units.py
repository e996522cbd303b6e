"""Which parameters live and lie together: the units of a module."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

__all__ = ["LARGE_BYTES", "UnitSpec", "UnitsArgument", "embeddings_of", "find_units", "repeated_blocks"]

LARGE_BYTES = 50_000_000
"""An embedding or head above this size is let go after use, like a block."""

UnitsArgument = Literal["auto"] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]


@dataclass
class UnitSpec:
    """A unit before it is sharded.

    Attributes:
        name: Name of the unit's module, or ``"rest"`` for the parameters outside every block.
        module: The module whose forward needs the parameters; None for the rest, which is whole all through a step.
        parameters: Name and parameter, in module order; a tied parameter appears once, under its first name.
    """

    name: str
    module: nn.Module | None
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model: children of its layer stacks.

    A stack is a ModuleList or Sequential of at least two children of one class that holds more than a fifth of the
    parameters outside the input and output embeddings; of nested stacks the outermost counts. A child that only lists
    others, and is never called itself, stands for those; tables whose rows are looked up from outside are no blocks.
    """
    ends = (*embeddings_of(root, "input"), *embeddings_of(root, "output"))
    embeddings = {id(p) for module in ends for p in module.parameters()}
    sizes = {id(p): p.numel() for p in root.parameters() if id(p) not in embeddings}
    total = sum(sizes.values())
    blocks: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(_inside(name, known) for known in blocks):
            continue
        children = list(module.children())
        if len(children) < 2 or len({type(child) for child in children}) != 1 or isinstance(children[0], nn.Embedding):
            continue
        if 5 * sum(sizes.get(id(p), 0) for p in module.parameters()) > total:
            prefix = f"{name}." if name else ""
            for index, child in module.named_children():
                blocks |= _called(f"{prefix}{index}", child)
    return blocks


def _called(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The module itself, or what is in it if it has no forward, like a ModuleList."""
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    inside: dict[str, nn.Module] = {}
    for index, child in module.named_children():
        inside |= _called(f"{name}.{index}", child)
    return inside


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def embeddings_of(root: nn.Module, end: Literal["input", "output"]) -> list[nn.Module]:
    """The input or output embeddings of every transformers model inside ``root``."""
    found = []
    for module in root.modules():
        try:
            embedding = getattr(module, f"get_{end}_embeddings")()
        except (AttributeError, NotImplementedError, TypeError):
            continue  # not a transformers model, or one without that embedding
        if isinstance(embedding, nn.Module):
            found.append(embedding)
    return found


def _chosen(root: nn.Module, units: UnitsArgument) -> dict[str, nn.Module]:
    if isinstance(units, str):
        if units != "auto":
            raise ValueError(
                f"units={units!r} is not understood: expected 'auto', a collection of module classes, or a callable "
                "from a module to a bool. HINT: pass for example units={torch.nn.TransformerEncoderLayer}."
            )
        large = {
            name: module
            for name, module in root.named_modules()
            if isinstance(module, (nn.Embedding, nn.Linear)) and _own_bytes(module) > LARGE_BYTES
        }
        blocks = repeated_blocks(root)
        alone = {name for name in large if not any(_inside(name, block) for block in blocks)}
        in_order = root.named_modules(remove_duplicate=False)
        return {name: module for name, module in in_order if name in blocks or name in alone}
    if callable(units):
        chosen = {name: module for name, module in root.named_modules() if name and units(module)}
    else:
        classes = tuple(units)
        if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
            raise ValueError(f"units={units!r} must name at least one subclass of torch.nn.Module and nothing else.")
        chosen = {name: module for name, module in root.named_modules() if name and isinstance(module, classes)}
    if not chosen:
        raise ValueError(
            f"units={units!r} selects no module of {type(root).__name__}. HINT: print the model and name the class of "
            "its repeated block, or use units='auto'."
        )
    return chosen


def _own_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))


def find_units(root: nn.Module, units: UnitsArgument = "auto") -> list[UnitSpec]:
    """Split the parameters of ``root`` into units.

    Every parameter belongs to the innermost chosen module that holds it. A parameter that several units use (tied
    weights), or that no chosen module holds, belongs to the rest.

    Args:
        root: The module to be sharded.
        units: ``"auto"``, a collection of module classes, or a callable that chooses modules.

    Returns:
        The units in module order, the rest first; units without parameters are left out.

    Raises:
        ValueError: If ``units`` is not understood or selects nothing.
    """
    chosen = _chosen(root, units)
    specs = {name: UnitSpec(name, module) for name, module in chosen.items()}
    rest = UnitSpec("rest", None)

    owners: dict[int, set[str]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        holders = [unit for unit in chosen if _inside(name, unit)]
        owners.setdefault(id(parameter), set()).add(max(holders, key=len, default=""))
        first.setdefault(id(parameter), (name, parameter))
    for key, entry in first.items():
        owner = owners[key]
        spec = specs[next(iter(owner))] if len(owner) == 1 and owner != {""} else rest
        spec.parameters.append(entry)
    return [spec for spec in (rest, *specs.values()) if spec.parameters]
