"""A plan for a model: what every tensor starts from, and by what its learning rate and weight decay are multiplied."""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_paro.algorithms.supar.masks import Masks, check_mask, densities, draw_mask, load_masks
from lightning_paro.algorithms.supar.multiples import multiples, pattern_of
from lightning_paro.algorithms.supar.roles import Tensors, find_roles, matches
from lightning_paro.algorithms.supar.rules import PARAMETERIZATIONS, ROLES, Parameterization, Role, factors

__all__ = ["Entry", "SuParPlan", "difference"]

FEW = 16
"""Weights that an output is the sum of, below which the paper's rules are no longer known to hold."""


@dataclass(frozen=True)
class Entry:
    """What the plan says of a tensor.

    Attributes:
        role: ``"embedding"``, ``"hidden"``, ``"output"`` or ``"vector"``.
        shape: Its shape.
        axis: Its dimension of fan-in.
        fan_in: Numbers that an output is the sum of.
        m_d: Fan-in as a multiple of the base model's.
        density: Share of weights that was asked to be kept.
        rho: Its density: exactly the share of weights that its mask keeps.
        init_std: Standard deviation at init; 0 for biases, None for what stays as its module made it, such as norms.
        lr_factor: Of the learning rate, with Adam and AdamW.
        sgd_lr_factor: Of the learning rate, with SGD.
        weight_decay_factor: Of the weight decay, with AdamW: learning rate times decay is the same at every width and
            density. 0 where nothing decays.
        why: The rule, with numbers.
    """

    role: Role
    shape: tuple[int, ...]
    axis: int
    fan_in: int
    m_d: float
    density: float
    rho: float
    init_std: float | None
    lr_factor: float
    sgd_lr_factor: float
    weight_decay_factor: float
    why: str


@dataclass(frozen=True)
class SuParPlan(Mapping[str, Entry]):
    """By parameter name, an :class:`Entry`; print it to see a table.

    Nothing hangs on the tensors: names are all that ties a plan to a model, so it survives wrappers, sharding and
    compilation.

    Attributes:
        entries: By parameter name, in the order of the model; what is tied stands there once.
        parameterization: ``"sp"``, ``"mup"`` or ``"supar"``.
        width: m_d of the output: the model's width as a multiple of the base model's.
        alpha_input: What the embeddings are multiplied by.
        alpha_output: What the logits are multiplied by, on top of 1 / ``width``.
        masks: How masks are drawn.
    """

    entries: Mapping[str, Entry]
    parameterization: Parameterization
    width: float
    alpha_input: float
    alpha_output: float
    masks: Masks

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        base_width: int | None = None,
        base_config: Any = None,
        density: float = 1.0,
        kind: str = "random",
        parameterization: Parameterization = "supar",
        init_std: float = 0.02,
        alpha_input: float = 1.0,
        alpha_output: float = 1.0,
        exclude: Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        masks: Masks | None = None,
    ) -> SuParPlan:
        """Make the plan of a model whose hyperparameters were tuned on a base model, smaller and dense.

        Args:
            model: A LightningModule or any other module; it may be on the meta device.
            base_width: Width of the base model, if all its dimensions are smaller by one factor.
            base_config: Else the transformers config of the base model, or the base model itself: each tensor is
                compared with its own, so that for example down-projections follow the ratio of the inner widths.
            density: Share of weights that are kept in the projections of the blocks; embeddings, output and vectors
                stay dense.
            kind: How masks are drawn, see :class:`Masks`.
            parameterization: ``"supar"``, or to compare ``"mup"``, which does not look at the density, and ``"sp"``,
                which looks at neither width nor density and ignores both alphas.
            init_std: Standard deviation of the base model's weights.
            alpha_input: Multiplies the embeddings' output.
            alpha_output: Multiplies the logits.
            exclude: Patterns of names, ``*`` and ``?`` allowed, that stay dense.
            overrides: By pattern what is known better: ``role``, ``density``, ``init_std``, ``lr_factor``,
                ``sgd_lr_factor``, ``weight_decay_factor``.
            seed: Of masks and initial values.
            masks: All of how masks are drawn, instead of ``density``, ``kind`` and ``seed``.

        Raises:
            ValueError: If an argument is not understood, a tensor of two or more dimensions has no role, a pattern
                matches nothing, or a mask would keep nothing of a tensor.
        """
        if parameterization not in PARAMETERIZATIONS:
            raise ValueError(f"parameterization={parameterization!r} is not one of {', '.join(PARAMETERIZATIONS)}.")
        _check_numbers(init_std=init_std, alpha_input=alpha_input, alpha_output=alpha_output)
        init_std, alpha_input, alpha_output = float(init_std), float(alpha_input), float(alpha_output)  # not numpy's
        if masks is not None and (density, kind, seed) != (1.0, "random", 0):
            raise ValueError(
                f"masks={masks} and density={density}, kind={kind!r}, seed={seed}: expected one or the other. HINT: "
                "masks has them all."
            )
        how = masks if masks is not None else Masks(kind=kind, density=density, seed=seed)  # type: ignore[arg-type]
        told = {pattern: dict(fields) for pattern, fields in (overrides or {}).items()}
        _check_overrides(told)
        _check_patterns(dict(model.named_parameters()), exclude, told)
        told = {p: {k: v if k == "role" else float(v) for k, v in fields.items()} for p, fields in told.items()}
        roles = {pattern: fields["role"] for pattern, fields in told.items() if "role" in fields}
        tensors = find_roles(model, roles)
        times = multiples(model, tensors, base_width, base_config, roles)
        asked = _asked(how, tensors, exclude, told)
        rhos = _exact(how, tensors, asked)
        if parameterization == "supar":
            _warn_of_few(tensors, rhos)
        entries = {}
        for name, tensor in tensors.items():
            m_in, m_out = times[name]
            rule = factors(parameterization, tensor.role, m_in, m_out, rhos.get(name, 1.0))
            std = rule.std * init_std if tensor.role != "vector" else 0.0 if name.endswith("bias") else None
            entry = Entry(
                tensor.role, tensor.shape, tensor.axis, tensor.fan_in, m_in, asked.get(name, 1.0), rhos.get(name, 1.0),
                std, rule.lr, rule.sgd_lr, rule.decay, "; ".join(filter(None, (tensor.why, rule.why))),
            )  # fmt: skip
            for pattern, fields in told.items():
                given = {key: value for key, value in fields.items() if key not in ("role", "density")}
                if given and matches(name, pattern, tensors):
                    entry = replace(entry, **given, why=f"{entry.why}; {', '.join(given)} as told")
            entries[name] = entry
        width = next((times[n][0] for n, t in tensors.items() if t.role == "output"), None)
        if width is None:  # tied, or there is none
            width = max((times[n][1] for n, t in tensors.items() if t.role == "embedding"), default=1.0)
        return cls(entries, parameterization, width, alpha_input, alpha_output, how)

    # ---- a mapping ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    # ---- what a model does with it --------------------------------------------------------------------------

    @property
    def is_sp(self) -> bool:
        """Whether neither embeddings, logits nor attention are scaled."""
        return self.parameterization == "sp"

    @property
    def input_scale(self) -> float:
        """What the embeddings are multiplied by."""
        return 1.0 if self.is_sp else self.alpha_input

    @property
    def output_scale(self) -> float:
        """What the logits, or what the output is the sum of, are multiplied by."""
        return 1.0 if self.is_sp else self.alpha_output / self.width

    @property
    def sparse(self) -> list[str]:
        """Names of the tensors that have a mask."""
        return [name for name, entry in self.entries.items() if entry.rho < 1]

    def __rich__(self) -> Table:
        scales = f"embeddings × {self.input_scale:g}, logits × {self.output_scale:.4g}"
        table = Table(
            title=f"{self.parameterization}, m_d = {self.width:g}, {scales}; {len(self.sparse)} sparse tensors"
        )
        table.add_column("tensor", overflow="fold")
        table.add_column("role", no_wrap=True)
        for column in ("fan-in", "m_d", "ρ", "init std", "LR ×", "decay ×"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("why")
        for name, entry, count in self._alike():
            std = "as built" if entry.init_std is None else f"{entry.init_std:.4g}"
            table.add_row(
                f"{name} ({count})" if count > 1 else name, entry.role, str(entry.fan_in), f"{entry.m_d:g}",
                f"{entry.rho:.5g}", std, f"{entry.lr_factor:.4g}", f"{entry.weight_decay_factor:.4g}", entry.why,
            )  # fmt: skip
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=160, force_jupyter=False).print(self)
        return text.getvalue()

    def _alike(self) -> Iterator[tuple[str, Entry, int]]:
        """Tensors that differ by the number of their layer only, together."""
        groups: dict[tuple[str, Entry], list[str]] = {}
        for name, entry in self.entries.items():
            groups.setdefault((pattern_of(name), entry), []).append(name)
        for (_, entry), names in groups.items():
            parts = zip(*(name.split(".") for name in names), strict=True)
            shown = ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
            yield shown, entry, len(names)

    def mask(self, name: str) -> Tensor:
        """Draw the mask of a tensor: bool, of its shape, on the host."""
        entry = self.entries[name]
        if self.masks.path is not None:
            return load_masks(self.masks.path)[name]
        return draw_mask(self.masks, name, entry.shape, entry.axis, entry.density)

    # ---- kept and compared ----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """In plain values, as for JSON or a checkpoint."""
        return asdict(self) | {"entries": {name: asdict(entry) for name, entry in self.entries.items()}}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SuParPlan:
        """The plan that :meth:`to_dict` was asked of."""
        entries = {n: Entry(**{**e, "shape": tuple(e["shape"])}) for n, e in content["entries"].items()}
        return cls(**{**content, "entries": entries, "masks": Masks(**content["masks"])})

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ if anything in the plan does."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def difference(one: SuParPlan, other: SuParPlan) -> str | None:
    """The first difference of two plans, in words, or None."""
    ours, theirs = one.to_dict(), other.to_dict()
    for key, told in (("parameterization", None), ("width", "m_d"), ("alpha_input", None), ("alpha_output", None)):
        if ours[key] != theirs[key]:
            return f"{told or key} {ours[key]} there, {theirs[key]} here"
    if ours["masks"] != theirs["masks"]:
        return f"masks {ours['masks']} there, {theirs['masks']} here"
    for name in {**one.entries, **other.entries}:
        there, here = ours["entries"].get(name), theirs["entries"].get(name)
        if there != here:
            return f"'{name}' {_short(there, here)} there, {_short(here, there)} here"
    return None


def _short(entry: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    if entry is None or other is None:
        return "not" if entry is None else "as a tensor"
    return ", ".join(f"{key}={entry[key]}" for key in entry if entry[key] != other[key] and key != "why")


OVERRIDES = ("role", "density", "init_std", "lr_factor", "sgd_lr_factor", "weight_decay_factor")


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise ValueError(f"{name}={value!r} must be a positive number.")


def _check_overrides(told: Mapping[str, Mapping[str, Any]]) -> None:
    for pattern, fields in told.items():
        unknown = [key for key in fields if key not in OVERRIDES]
        if unknown:
            raise ValueError(f"overrides[{pattern!r}] has {unknown[0]!r}; expected some of {', '.join(OVERRIDES)}.")
        if fields.get("role", ROLES[0]) not in ROLES:
            raise ValueError(f"overrides[{pattern!r}]: role={fields['role']!r} is not one of {', '.join(ROLES)}.")
        _check_numbers(**{key: value for key, value in fields.items() if key not in ("role", "weight_decay_factor")})
        decay = fields.get("weight_decay_factor", 0.0)
        if isinstance(decay, bool) or not (isinstance(decay, (int, float)) and 0 <= decay < math.inf):
            raise ValueError(f"overrides[{pattern!r}]: weight_decay_factor={decay!r} must be a number, 0 or more.")


def _check_patterns(names: Mapping[str, Any], exclude: Sequence[str], told: Mapping[str, Any]) -> None:
    if isinstance(exclude, str):
        raise ValueError(f"exclude={exclude!r} must be several patterns. HINT: exclude=({exclude!r},).")
    for pattern in (*exclude, *told):
        if not any(matches(name, pattern, names) for name in names):
            some = ", ".join(list(names)[:3])
            raise ValueError(f"{pattern!r} matches no tensor of the model, such as {some}. HINT: print the plan.")


def _asked(
    how: Masks, tensors: Tensors, exclude: Sequence[str], told: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """The density that every tensor with a mask is to have."""
    chosen = {
        name: (tensor.fan_in, tensor.fan_out)
        for name, tensor in tensors.items()
        if tensor.is_sparse and not any(matches(name, pattern, tensors) for pattern in exclude)
    }
    is_fixed = how.kind in ("nm", "file")
    if how.kind == "file" and exclude or is_fixed and any("density" in fields for fields in told.values()):
        raise ValueError(
            f"masks of kind={how.kind!r} have their own density, and there are others in exclude or overrides. HINT: "
            "leave these out, or take another kind."
        )
    asked = {} if how.is_dense or how.kind == "file" else densities(how, chosen)
    for pattern, fields in told.items():
        matrices = [n for n, tensor in tensors.items() if matches(n, pattern, tensors) and tensor.role != "vector"]
        if "density" in fields and (not matrices or not fields["density"] <= 1):
            raise ValueError(
                f"overrides[{pattern!r}]: a density of {fields['density']}; expected at most 1, of matrices."
            )
        asked |= dict.fromkeys(matrices, fields["density"]) if "density" in fields else {}
    return {name: density for name, density in asked.items() if density < 1}


def _exact(how: Masks, tensors: Tensors, asked: dict[str, float]) -> dict[str, float]:
    """The share that masks keep, which differs from what was asked by rounding, or by chance."""
    found = {}
    loaded = load_masks(how.path) if how.path is not None else {}
    lost = [name for name in loaded if name not in tensors]
    if lost:
        raise ValueError(f"{how.path} has a mask of '{lost[0]}', which the model has not.")
    for name in (*asked, *loaded):
        tensor = tensors[name]
        count = math.prod(tensor.shape)
        if how.kind in ("random", "er"):
            found[name] = round(asked[name] * count) / count
        else:
            mask = loaded[name] if loaded else draw_mask(how, name, tensor.shape, tensor.axis, asked[name])
            check_mask(name, mask, tensor.shape)
            found[name] = int(mask.sum()) / count
        if not found[name]:
            raise ValueError(
                f"a density of {asked[name]} keeps none of the {count} weights of '{name}'. HINT: exclude it."
            )
    return found


def _warn_of_few(tensors: Tensors, rhos: Mapping[str, float]) -> None:
    few = {name: kept for name, rho in rhos.items() if (kept := rho * tensors[name].fan_in) < FEW}
    if few:
        name, kept = next(iter(few.items()))
        warnings.warn(
            f"an output of '{name}' is the sum of {kept:.1f} weights; the rules suppose many, and below {FEW} "
            "hyperparameters may not carry over. HINT: a larger density or width.",
            stacklevel=3,
        )
