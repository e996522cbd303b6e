"""What a language model is made of: its layers, its embeddings, its head, and the rest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_paro.sharding import embeddings_of, repeated_blocks

__all__ = ["Anatomy", "dissect"]

Named = Mapping[str, nn.Parameter]


@dataclass(frozen=True)
class Anatomy:
    """Every trainable parameter of a model, each in one place, by name.

    Attributes:
        layers: For each layer, by the name of its module, its own parameters, in the order of the model (of the paths,
            if those were given).
        embeddings: What the tokens or positions are looked up in.
        head: What makes the output; empty if it is tied to the embeddings.
        rest: Everything else outside of the layers, such as the last norm, and what a layer shares with it.
        tied: Whether head and embeddings share a parameter, which then counts as an embedding.
    """

    layers: Mapping[str, Named]
    embeddings: Named
    head: Named
    rest: Named
    tied: bool


def dissect(model: nn.Module, layers: str | Sequence[str] = "auto") -> Anatomy:
    """Tell the layers of a model from the rest; parameters that do not require a gradient are left out.

    Args:
        model: A transformers model, any other module, or a LightningModule that holds one.
        layers: ``"auto"``: the repeated blocks; what is in a list of lists counts one by one. Or the path of the list
            that holds the layers, such as ``"model.layers"``, or several of them. A path may leave out what is in
            front of the model proper (a LightningModule's attribute, a wrapper of PEFT or of torch.compile). Several
            stacks count as one: an encoder's and a decoder's, but also those of two models that are trained side by
            side, unless the path of one is given. A frozen layer is none.

    Raises:
        ValueError: If there are no layers to train, a path is not that of a list of modules, or layers share
            parameters.
    """
    blocks = _stacks(model)
    stack = blocks if layers == "auto" else _at(model, [layers] if isinstance(layers, str) else layers)
    modules = _trainable(stack)
    if not modules:
        raise ValueError(_all_frozen(model, list(stack)) if stack else _no_layers(model))

    outside = [module for _, module in model.named_modules(memo=set(modules.values()))]
    apart = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
    embeddings = _parameters(embeddings_of(model, "input"))
    embeddings |= _parameters(module for module in outside if isinstance(module, nn.Embedding))
    beside = {module for block in blocks.values() for module in block.modules() if module is not block}
    behind = _behind(model, modules.values()) - beside
    head = _parameters(embeddings_of(model, "output"))
    head = head or _parameters(m for m in outside if isinstance(m, nn.Linear) and m in behind)
    owners = _owners(modules, apart | embeddings | head)

    placed: dict[str, dict[str, nn.Parameter]] = {layer: {} for layer in modules}
    first: dict[str, nn.Parameter] = {}
    last: dict[str, nn.Parameter] = {}
    rest: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = id(parameter)
            own = placed[owners[key]] if key in owners else rest
            place = first if key in embeddings else last if key in head else own
            place[name] = parameter
    return Anatomy({layer: own for layer, own in placed.items() if own}, first, last, rest, bool(embeddings & head))


def _parameters(modules: Iterable[nn.Module]) -> set[int]:
    """What requires a gradient."""
    return {id(parameter) for module in modules for parameter in module.parameters() if parameter.requires_grad}


def _trainable(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if _parameters([module])}


def _behind(model: nn.Module, layers: Collection[nn.Module]) -> set[nn.Module]:
    """What comes after the first layer: a projection of the inputs does not."""
    known = set(layers)
    return set(itertools.dropwhile(lambda module: module not in known, model.modules()))


def _owners(modules: Mapping[str, nn.Module], apart: Collection[int]) -> dict[int, str]:
    """The layer of each parameter that is used in layers alone."""
    owners: dict[int, str] = {}
    for layer, module in modules.items():
        for key in _parameters([module]).difference(apart):
            if owners.setdefault(key, layer) != layer:
                raise ValueError(
                    f"layers '{owners[key]}' and '{layer}' share parameters, so one cannot be trained without the "
                    "other. HINT: train all of the model, or adapters that belong to one layer each."
                )
    return owners


def _stacks(model: nn.Module) -> dict[str, nn.Module]:
    """What ``"auto"`` takes for layers."""
    names = [name.removesuffix("._orig_mod") for name in repeated_blocks(model)]  # also of a layer compiled by itself
    blocks = {name: model.get_submodule(name) for name in names}
    blocks |= {} if _trainable(blocks) else _counted(model)
    blocks |= _alike(model, _trainable(blocks))
    places = {module: place for place, module in enumerate(model.modules())}
    return dict(sorted(blocks.items(), key=lambda block: places[block[1]]))


def _alike(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Lists of the same name and of layers as large, such as a decoder's two beside an encoder's thirty-two."""
    kinds = {part for name in blocks for part in _proper(name)[-2:-1]}
    least = max(map(_size, blocks.values()), default=0) / 2
    known = set(blocks.values())
    found: dict[str, nn.Module] = {}
    for name, stack in model.named_modules(memo=set(known)):
        if (
            isinstance(stack, nn.ModuleList)
            and kinds.intersection(_proper(name)[-1:])
            and known.isdisjoint(stack.modules())
        ):
            children = _children(name, stack)
            if min(map(_size, children.values()), default=0) >= least:
                found |= children
    return found


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _counted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of several classes, such as Jamba's: lists of as many as the config says."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for child, stack in module.named_children():
            if isinstance(stack, nn.ModuleList) and len(stack) == _count(module) > 1:
                found |= _children(f"{name}.{child}" if name else child, stack)
    return found


def _count(module: nn.Module) -> int:
    """How many layers a transformers model has according to its config; 0 if there is none."""
    count = getattr(getattr(module, "config", None), "num_hidden_layers", 0)
    return count if isinstance(count, int) else 0


def _children(name: str, stack: nn.Module) -> dict[str, nn.Module]:
    """The modules of a list, each place by itself: those that share a module share its parameters."""
    places = {f"{name}.{index}" if name else index: child for index, child in stack._modules.items()}
    return {place: child for place, child in places.items() if child is not None}


def _at(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """The children of the lists at some paths."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        parts = _proper(path)
        places = dict(model.named_modules(remove_duplicate=False))
        held = {name: m for name, m in places.items() if _proper(name)[-len(parts) :] == parts}
        lists = {name: m for name, m in held.items() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)}
        lists = {name: m for name, m in lists.items() if _proper(name) == parts} or lists
        if len(set(lists.values())) != 1:
            what = (
                f"is that of {_shown(lists)}" if lists
                else f"is that of a {type(next(iter(held.values()))).__name__}" if held
                else "is not there"
            )  # fmt: skip
            raise ValueError(
                f"layers={path!r} {what}; expected the path of one ModuleList or Sequential that is not empty. HINT: "
                f"this model has {_shown(_lists(model)) or 'none'}."
            )
        (stack,) = set(lists.values())
        found |= _children(next(name for name, module in places.items() if module is stack), stack)
    return found


def _proper(name: str) -> list[str]:
    """A module's path without what torch.compile puts into it."""
    return [part for part in name.split(".") if part not in ("", "_orig_mod")]


def _lists(model: nn.Module) -> list[str]:
    lists = {name: m for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    return [name for name, module in lists.items() if len(module) > 1]


def _shown(names: Iterable[str]) -> str:
    """Paths of lists for a message; those that only differ by the layer they are in are named once."""
    proper = (".".join(_proper(name)) for name in names)
    return ", ".join(sorted({re.sub(r"(^|\.)\d+(?=\.)", r"\1N", name) or "'' (the model itself)" for name in proper}))


def _all_frozen(model: nn.Module, layers: Sequence[str]) -> str:
    return (
        f"all {len(layers)} layers of {type(model).__name__}, '{layers[0]}' to '{layers[-1]}', are frozen; expected "
        "parameters that require a gradient. HINT: unfreeze them first, or name others, layers='...', one or several "
        f"of {_shown(_lists(model))}."
    )


def _no_layers(model: nn.Module) -> str:
    lists = _shown(_lists(model))
    for module in model.modules():
        if _count(module) > 1 and not _lists(module):
            return (
                f"{type(module).__name__} has no list of the {_count(module)} layers of its config: where they share "
                "their parameters, as ALBERT's do, there is nothing to choose between. HINT: train all of it."
            )
    return (
        f"{type(model).__name__} has no stack of layers: expected a ModuleList or Sequential with at least two modules "
        "of one class, and in them a fifth of the parameters outside of the embeddings. HINT: "
        + (f"name it, layers='...', one or several of {lists}." if lists else "put the repeated layers into one.")
    )
