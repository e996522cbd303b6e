"""The partition ``"auto"``: decided once, before anything is sharded, and kept with the training it was decided for."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from torch import Tensor, nn

from lightning_paro.collectives import ProcessGroups
from lightning_paro.planner import (
    MARGIN,
    FreeMemory,
    Network,
    Plan,
    StateBytes,
    Workload,
    cached_probe,
    free_memory,
    make_plan,
    smallest_share,
    table,
)
from lightning_paro.sharding import PrecisionPolicy, UnitSpec, agree, find_units
from lightning_paro.strategies._trial import measure_micro_batch
from lightning_paro.topology import Partition, Topology

__all__ = ["AutoPartition"]

KEY = "lightning_paro"  # in a checkpoint


@dataclass
class _Decision:
    """A partition, where it was decided, and whether for training; as it is written to checkpoints."""

    partition: str
    world_size: int
    group_size: int
    training: bool = True


@dataclass
class AutoPartition:
    """Decides on a partition, by measurements and the planner; the arguments are those of ParoStrategy."""

    memory: float | None = None
    compute: float | None = None
    activations: float | None = None
    example_batch: Any = None
    reprobe: bool = False
    plan: Plan | None = field(default=None, init=False)
    _decision: _Decision | None = field(default=None, init=False)
    _module: weakref.ref[nn.Module] | None = field(default=None, init=False)  # that it was decided for
    _stored: _Decision | None = field(default=None, init=False)  # in the checkpoint that the next run continues

    @classmethod
    def read(cls, name: str, **options: Any) -> AutoPartition | None:
        """One for the name ``"auto"``; None for the name of a partition, which takes no options.

        Raises:
            ValueError: If there are options beside a partition, or one makes no sense.
        """
        if str(name).strip().lower().removeprefix("paro_") == "auto":
            return cls(**options)
        given = [option for option, value in options.items() if value is not None and value is not False]
        if given:
            raise ValueError(
                f"{', '.join(given)}: only of use where the partition is to be found out, but it is {str(name)!r}. "
                "HINT: leave out what goes with partition='auto', or use that."
            )
        return None

    def __post_init__(self) -> None:
        for name in ("memory", "compute", "activations"):
            value = getattr(self, name)
            least = 1 if name == "memory" else 0
            if value is not None and not (isinstance(value, (int, float)) and least <= value < float("inf")):
                unit = "seconds" if name == "compute" else "bytes"
                raise ValueError(f"{name}={value!r} is not understood: expected a number of {unit}.")

    # ---- what is kept ---------------------------------------------------------------------------------------

    def store(self, checkpoint: dict[str, Any]) -> None:
        """Write what was decided for training into a checkpoint."""
        if self._decision is not None and self._decision.training:
            checkpoint[KEY] = dict(vars(self._decision))

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Read what was decided for the training that the next run continues."""
        try:
            self._stored = _Decision(**checkpoint[KEY]) if KEY in checkpoint else None
        except TypeError:
            if not self.reprobe:
                raise ValueError(
                    f"the checkpoint's {KEY!r} is {checkpoint[KEY]!r}, which is no decision of this version. "
                    "HINT: ParoStrategy('auto', reprobe=True) decides anew."
                ) from None

    def _known(self, module: nn.Module, training: bool) -> _Decision | None:
        stored, self._stored = self._stored, None
        if stored is not None and not self.reprobe:
            return stored
        known = self._decision
        if known is None or self._module is None or self._module() is not module:
            return None
        return known if known.training or not training else None

    # ---- deciding -------------------------------------------------------------------------------------------

    def decide(
        self,
        trainer: Trainer,
        module: LightningModule,
        groups: ProcessGroups,
        policy: PrecisionPolicy,
        units: Any,
        bucket_bytes: int,
    ) -> Partition:
        """The partition, the same on all ranks. Collective.

        It is that of the checkpoint, unless ``reprobe``; else that of an earlier run of this module; else the fastest
        that fits, of equally fast ones that with the least memory.

        Raises:
            ValueError: If nothing fits, or one micro-batch cannot be measured.
        """
        training = trainer.state.fn is TrainerFn.FITTING
        topology = groups.topology
        known = agree(groups, "looking for an earlier decision", lambda: self._known(module, training))[0]
        if known is None:
            plan = self._make_plan(trainer, module, groups, policy, units, bucket_bytes, training)
            self.plan = agree(groups, "deciding", lambda: plan if groups.rank == 0 else None)[0]
            assert self.plan is not None
            if self.plan.recommended is None:
                raise _nothing_fits(self.plan)
            rank_zero_info(f"{_text(self.plan)}{_why(self.plan)}")
            known = _Decision(str(self.plan.recommended.partition), topology.world_size, topology.group_size, training)
        elif (known.world_size, known.group_size) != (topology.world_size, topology.group_size):
            rank_zero_warn(_elsewhere(known, topology))
        else:
            rank_zero_info(f"paro_{known.partition} was decided before and is kept. reprobe=True decides anew.")
        self._decision, self._module = known, weakref.ref(module)
        return Partition.parse(known.partition)

    def _make_plan(
        self,
        trainer: Trainer,
        module: LightningModule,
        groups: ProcessGroups,
        policy: PrecisionPolicy,
        units: Any,
        bucket_bytes: int,
        training: bool,
    ) -> Plan:
        device = trainer.strategy.root_device
        network = cached_probe(groups, device, fresh=self.reprobe).network()
        specs: list[UnitSpec] = []

        def look() -> FreeMemory:
            specs.extend(find_units(module, units))
            given = self.memory
            return free_memory(device) if given is None else FreeMemory((str(groups.rank), ""), int(given), 0)

        memory = smallest_share(agree(groups, "looking at the model and the memory", look))
        workload = replace(_workload(module, specs, policy), bucket_bytes=bucket_bytes)
        if not training:  # one forward keeps nothing
            return make_plan(replace(workload, trainable=0, activations=self.activations or 0), network, memory)
        compute, activations = self.compute, self.activations
        if compute is None or activations is None:
            measured = measure_micro_batch(trainer, module, groups, policy, specs, self.example_batch)
            compute = measured.seconds if compute is None else compute
            activations = measured.activations if activations is None else activations
        s = _micro_batches(trainer)
        return make_plan(replace(workload, accumulate=s, compute=compute, activations=activations), network, memory)


def _micro_batches(trainer: Trainer) -> int:
    """Of the first step."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(0)
    return trainer.accumulate_grad_batches


def _workload(module: nn.Module, units: Sequence[UnitSpec], policy: PrecisionPolicy) -> Workload:
    """Sizes and bytes of a module, with Adam as its optimizer."""
    compute, master = policy.compute_dtype, policy.master_dtype
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return Workload(
        _numel(parameters),
        _numel(trained),
        rest=sum(_numel(p for _, p in unit.parameters) for unit in units if unit.module is None),
        largest_unit=max((_numel(p for _, p in unit.parameters) for unit in units if unit.module), default=0),
        sizes=StateBytes(
            parameters=_mean(parameters, lambda own: compute(own).itemsize),
            gradients=_mean(trained, lambda own: policy.accumulated_in(own).itemsize),
            optimizer=_mean(trained, lambda own: master(own).itemsize * (2 + (master(own) != compute(own)))),
            intra=_mean(trained, lambda own: policy.sent_inside(own).itemsize),
            inter=_mean(trained, lambda own: policy.sent_between(own).itemsize),
            copied=_mean(trained, lambda own: compute(own).itemsize * (master(own) != compute(own))),
        ),
    )


def _numel(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _mean(parameters: Sequence[Tensor], itemsize: Callable[[torch.dtype], int]) -> float:
    """Bytes per parameter; of several dtypes, on average."""
    return sum(p.numel() * itemsize(p.dtype) for p in parameters) / max(_numel(parameters), 1)


# ---- what is said -------------------------------------------------------------------------------------------


def _text(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(table(plan))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def _why(plan: Plan) -> str:
    best, workload = plan.recommended, plan.workload
    assert best is not None
    fitting = [row for row in plan.rows if row.fits]
    as_fast = sum(row.cost.step_s <= best.cost.step_s * (1 + 1e-6) for row in fitting)
    among = f" and, of {as_fast} as fast, the one of the least memory" if as_fast > 1 else ""
    return (
        f"Of {len(plan.rows)} partitions {len(fitting)} fit in the {plan.memory / 1e9:.4g} GB of the smallest rank. "
        f"paro_{best.partition} is the fastest of these{among}: {best.cost.step_s:.3g} s a step. "
        f"A micro-batch computes for {workload.compute:.3g} s with {workload.activations / 1e9:.3g} GB of activations. "
        f"{_links(plan.network)}"
    )


def _links(network: Network) -> str:
    bandwidths = {
        "inside a group": network.intra, "between groups": network.inter, "all columns": network.column,
        "a flat ring": network.ring,
    }  # fmt: skip
    told = [f"{where} {8e-9 * value:.3g}" for where, value in bandwidths.items() if value and value != float("inf")]
    return f"Gbit/s: {', '.join(told)}, kept since they were measured; reprobe=True measures again." if told else ""


def _nothing_fits(plan: Plan) -> ValueError:
    least = min(plan.rows, key=lambda row: row.cost.memory_bytes)
    need = least.cost.memory_bytes * MARGIN
    return ValueError(
        f"no partition fits in the {plan.memory / 1e9:.4g} GB of the smallest rank. paro_{least.partition} needs the "
        f"least: {need / 1e9:.4g} GB with a margin of {MARGIN - 1:.0%}, {(need - plan.memory) / 1e9:.4g} GB too much; "
        f"{plan.workload.activations / 1e9:.4g} GB are activations.\n{_text(plan)}"
        "HINT: use activation_checkpointing, a smaller batch_size with more accumulate_grad_batches, more ranks, or "
        f"train fewer parameters. To try it nevertheless, name the partition: strategy='paro_{least.partition}'."
    )


def _elsewhere(known: _Decision, topology: Topology) -> str:
    return (
        f"paro_{known.partition} was decided for {known.world_size} ranks in groups of {known.group_size}, and is kept "
        f"for {topology.world_size} in groups of {topology.group_size}. HINT: ParoStrategy('auto', reprobe=True) "
        "decides anew; another partition adds up in another order."
    )
