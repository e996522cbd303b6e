"""The engine: one mechanism, three rungs. It moves a module's model state up and down the ladder around each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_paro.collectives import BUCKET_BYTES, Ladder, ProcessGroups, Traffic
from lightning_paro.sharding._accord import Accord
from lightning_paro.sharding._ascent import Ascent
from lightning_paro.sharding._backward import Backward
from lightning_paro.sharding._buffers import Buffers
from lightning_paro.sharding._consensus import agree, check_same_model, describe_model, meet
from lightning_paro.sharding._descent import Descent
from lightning_paro.sharding._evaluation import Evaluation
from lightning_paro.sharding._flat import Flat
from lightning_paro.sharding._optimizer import OptimizerShards, swap
from lightning_paro.sharding._policy import PrecisionPolicy
from lightning_paro.sharding._unit import Unit
from lightning_paro.sharding._units import UnitsArgument, UnitSpec, find_units
from lightning_paro.sharding._whole import lent_to_rank_zero, rewritten, whole_on_all_ranks
from lightning_paro.topology import Granularity, Partition

__all__ = ["Engine"]

T = TypeVar("T")


class Engine:
    """Shards a module by a partition and trains it, from rank 0's values.

    The caller brackets its work: :meth:`step_begin` and :meth:`step_end` around a training step,
    :meth:`backward_begin` and :meth:`backward_end` around a backward, and those of :attr:`evaluation` around a loop
    without training. The optimizers given to :meth:`attach` step on shards by themselves.

    Args:
        module: The module, whole on rank 0; other ranks need the same names, shapes and dtypes only.
        partition: The three granularities.
        groups: The process groups of the topology.
        policy: Dtypes.
        units: What is gathered and let go together, see :func:`find_units`.
        bucket_bytes: Units next to each other travel together up to this many bytes, whole and in the compute dtype.
        device: Where model state lives.
        nonfinite: What a step does with a gradient that is not finite on some rank: ``"propagate"`` as DDP does,
            ``"skip"`` the step on all ranks, or ``"raise"`` on all ranks.

    Raises:
        ValueError: If ranks disagree on the model, or ``units`` selects nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        groups: ProcessGroups,
        *,
        policy: PrecisionPolicy | None = None,
        units: UnitsArgument = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | str = "cpu",
        nonfinite: str = "propagate",
    ) -> None:
        self.module = module
        self.groups = groups
        self.topology = groups.topology
        self.partition = groups.topology.effective(partition)
        self.policy = policy or PrecisionPolicy()
        self.device = torch.device(device)
        self.nonfinite = nonfinite
        self.traffic = Traffic()
        self.optimizers: list[OptimizerShards] = []
        self.sync_gradients = True
        """Whether the next backward is a boundary, see :meth:`backward_begin`."""
        self.is_in_step = False
        """Whether a training step is under way."""
        self._in_backward = self._is_boundary = self._rest_is_held = False

        specs: list[UnitSpec] = []

        def describe() -> dict[str, Any]:
            specs.extend(find_units(module, units))
            names = [(spec.name, [name for name, _ in spec.parameters]) for spec in specs]
            size = self.topology.group_size
            return describe_model(
                module,
                partition=str(partition),
                group_size=size,
                dtypes=self.policy,
                units=names,
                bucket_bytes=bucket_bytes,
            )

        check_same_model(agree(groups, "describing the model", describe))

        ladder = Ladder(groups, self.device, self.traffic)
        self._descent = Descent(ladder, bucket_bytes)
        self.units: list[Unit] = []
        for spec in specs:
            kinds: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
            for name, parameter in spec.parameters:
                kinds.setdefault((parameter.requires_grad, parameter.dtype), []).append((name, parameter))
            flats = [
                Flat(spec.name, parameters, self.partition, self.policy, ladder, self.device)
                for parameters in kinds.values()
            ]
            hooks = (self._descent.catch_up, self._on_need, self._on_reach, self._keeps)
            self.units.append(Unit(len(self.units), spec.name, spec.module, flats, *hooks))
        self._rest = [unit for unit, spec in zip(self.units, specs, strict=True) if spec.module is None]
        self.flats = [flat for unit in self.units for flat in unit.flats]
        self.accord = Accord([unit.name for unit in self.units], self.partition, groups, self.traffic)
        self._ascent = Ascent(self.units, ladder, bucket_bytes, self.accord)
        self._backward = Backward(self.units, self._descent)
        self.where: dict[int, tuple[Flat, int]] = {
            id(slot.parameter): (flat, index) for flat in self.flats for index, slot in enumerate(flat.slots)
        }
        self.evaluation = Evaluation(self.units, self._rest, groups)
        self._buffers = Buffers(module, groups, self.traffic)
        self._buffers.sync_all()
        self._backward.listen()
        self.traffic.reset()

    # ---- brackets -------------------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """Start of a training step: forget what an interrupted one left, make the rest whole for the user to read."""
        self._reset()
        self._ascent.step_begin()
        self._backward.listen()
        if self.module.training:
            self._buffers.sync_persistent()
        self.is_in_step = self._rest_is_held = True
        for unit in self._rest:
            unit.hold()
            for flat in unit.flats:
                flat.settle()

    def step_end(self, backward_follows: bool = False) -> None:
        """End of a training step.

        Args:
            backward_follows: Whether a backward will still come (automatic optimization); the rest then stays whole
                until that is over.

        Raises:
            RuntimeError: On all ranks, if ranks needed different units in the first step.
        """
        self.is_in_step = False
        if self._ascent.is_first and self.partition.p is not Granularity.N:
            self.accord.compare_paths()  # later steps compare where they leave the path of the one before
        if not backward_follows:
            for unit in self.units:
                if unit.is_kept:
                    unit.settle()
            self._let_rest_go()

    def backward_begin(self) -> None:
        """Start of a backward.

        If :attr:`sync_gradients` is set it is a boundary, whose gradients go all the way down to the optimizer's
        shards; otherwise they are accumulated at the rung of g.
        """
        self._drop_backward()
        self._descent.wait()
        self._backward.listen()
        self._in_backward = True
        self._is_boundary = self.sync_gradients
        self._backward.begin(self._is_boundary)

    def backward_end(self) -> None:
        """End of a backward: reduce what is left, agree on what was used, show the optimizer its gradients."""
        self._backward.end()
        if self._is_boundary:
            self.accord.at_boundary(self._backward.flats)
        self._descent.end(self._is_boundary)
        for flat in self.flats:
            flat.show()
        self._in_backward = False
        self._ascent.backward_end()
        for unit in self.units:
            unit.settle(another_follows=self.is_in_step)
        if not self.is_in_step:
            self._let_rest_go()

    def abort(self) -> None:
        """Something was raised inside a step: release everything, so that the next step starts clean."""
        self._reset()
        self._ascent.abort()
        for shards in self.optimizers:
            shards.abort()

    def full_parameters(self, module: nn.Module | None = None, writeback: bool = False) -> AbstractContextManager[None]:
        """Whole parameter values, in the compute dtype, on every rank inside the context. Collective.

        Args:
            module: Only the units that hold a parameter of this module; None for all.
            writeback: Keep rank 0's changes. Without it they are lost, however the context ends; only where parameters
                are whole and the optimizer's state is not (p=N, os=I or G) does an exception leave them there.
        """
        chosen = self.units
        if module is not None:
            flats = {id(self.locate(p)[0]) for p in module.parameters()}
            chosen = [unit for unit in self.units if any(id(flat) in flats for flat in unit.flats)]
        return whole_on_all_ranks(self, chosen, writeback)

    # ---- optimizers -----------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer) -> OptimizerShards:
        """Let an optimizer that was built on the module's parameters work on this rank's shards of them."""
        shards = swap(optimizer, self)
        self.optimizers.append(shards)
        return shards

    def shards_of(self, optimizer: torch.optim.Optimizer) -> OptimizerShards:
        """What :meth:`attach` made of an optimizer, or of a wrapper around it."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        for shards in self.optimizers:
            if shards.optimizer is inner:
                return shards
        raise ValueError(f"{type(optimizer).__name__} is not an optimizer of this module.")

    def set_trainable(
        self, parameters: Iterable[nn.Parameter], flag: bool, keep_master: bool = False, keep_state: bool = False
    ) -> None:
        """Freeze or unfreeze parameters, on every rank alike.

        What is frozen gives back its gradients and optimizer state. A flat whose parameters are all frozen gives back
        its accumulators and master weights as well, and takes no part in reduces and updates.

        Args:
            parameters: Parameters of the module.
            flag: Whether they are trained.
            keep_master: Keep the master weights of what is frozen: without them an update below the resolution of the
                compute dtype is lost.
            keep_state: Let optimizers keep their state of what is frozen.
        """
        touched: dict[Flat, list[int]] = {}
        for parameter in parameters:
            flat, index = self.locate(parameter)
            parameter.requires_grad_(flag)
            touched.setdefault(flat, []).append(index)
        for flat, indices in touched.items():
            if flag and not flat.trainable:
                flat.unfreeze()
            elif not flag:
                flat.clear(indices)
                if flat.trainable and not any(slot.parameter.requires_grad for slot in flat.slots):
                    flat.freeze(keep_master)
                    indices = list(flat.indices)
                entries = [entry for index in indices if (entry := flat.entries[index]) is not None]
                for shards in self.optimizers if not keep_state else ():
                    for entry in entries:
                        shards.optimizer.state.pop(entry, None)
        self._backward.listen()

    def grad_norm(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """The 2-norm of the whole gradient, the same on all ranks. Collective.

        Args:
            optimizer: Only the parameters of this optimizer; None for all.

        Returns:
            A scalar tensor on the engine's device.
        """
        chosen = self.optimizers if optimizer is None else [self.shards_of(optimizer)]
        gradients = list({id(g): g for shards in chosen for g in shards.gradients()}.values())  # two may share some
        wide = torch.float64 if any(flat.master_dtype is torch.float64 for flat in self.flats) else torch.float32
        total = torch.zeros((), dtype=wide, device=self.device)
        if gradients:
            gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
            norms = torch._foreach_norm(gradients, 2, dtype=wide)
            total = torch.stack(norms).square().sum()
        return self.sum_over_shards(total).sqrt()

    def discard_ahead(self) -> None:
        """Before values change: forget what has been gathered ahead of its use."""
        self._ascent.discard()

    def update(self, moved: Mapping[Flat, Iterable[int]]) -> None:
        """After a step: the new values of some flats, in which these slots moved, climb to rung p."""
        self._ascent.update(moved)

    def settle(self) -> None:
        """Have the new values of the last step everywhere; forwards wait by themselves for those that they need."""
        self.discard_ahead()  # whoever asks may write to the shards
        for flat in self.flats:
            flat.settle()

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum a per-shard value over the ranks whose shards make up one copy of the optimizer state, in place."""
        if self.topology.world_size > 1 and self.partition.os is not Granularity.N:
            whole_world = self.partition.os is Granularity.G
            torch.distributed.all_reduce(value, group=None if whole_world else self.groups.intra_reduce)
            self.traffic.control += value.nbytes
        return value

    def meet(self, what: str) -> None:
        """Raise on all ranks unless all came here for the same purpose. Collective, on the host."""
        meet(self.groups, what)

    def agree(self, what: str, make: Callable[[], T]) -> list[T]:
        """Everybody's result of ``make``, by rank; if it raises on one rank, all raise. Collective, on the host."""
        return agree(self.groups, what, make)

    def maximum(self, values: Tensor, what: str) -> Tensor:
        """The elementwise maximum of an integer host tensor over all ranks, in place. Collective, on the host."""
        return self.accord.maximum(values, what)

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Collective, on the host."""
        return bool(self.maximum(torch.tensor([int(flag)]), "comparing flags").item())

    def model_state_bytes(self) -> int:
        """What the formula says this rank's model state takes, with Adam (PaRO, section 5)."""
        divide = self.topology.divisor
        total = 0
        for flat in self.flats:
            if not flat.is_cast:
                total += flat.numel * flat.dtype.itemsize // divide(self.partition.p)
            if flat.is_mastered:
                total += flat.numel * flat.master_dtype.itemsize // divide(self.partition.os)
            if flat.trainable:
                total += flat.numel * flat.accumulator_dtype.itemsize // divide(self.partition.g)
                total += flat.numel * 2 * flat.master_dtype.itemsize // divide(self.partition.os)
        return total

    def held_bytes(self) -> dict[str, int]:
        """Bytes of model state this rank holds just now: ``parameters``, ``gradients``, ``master``, ``optimizer``.

        What is gathered, or staged on its way to a shard, is not part of it.
        """
        total = dict.fromkeys(("parameters", "gradients", "master", "optimizer"), 0)
        for flat in self.flats:
            for kind, nbytes in flat.nbytes().items():
                total[kind] += nbytes
        for shards in self.optimizers:
            for entry in shards.entries():
                state = shards.optimizer.state.get(entry, {}).values()
                total["optimizer"] += sum(v.nbytes for v in state if isinstance(v, Tensor) and v.shape == entry.shape)
        return total

    def rounded_frozen(self) -> int:
        """Number of frozen parameters whose own dtype is wider than the one they are kept in."""
        flats = [flat for flat in self.flats if not flat.trainable and flat.dtype != flat.own_dtype]
        return sum(slot.numel for flat in flats for slot in flat.slots)

    def locate(self, parameter: Tensor) -> tuple[Flat, int]:
        """The flat that holds a parameter of the module, and its slot.

        Raises:
            ValueError: If it is not a parameter of the module.
        """
        try:
            return self.where[id(parameter)]
        except KeyError:
            raise ValueError(
                f"a tensor of shape {tuple(parameter.shape)} is not a parameter of {type(self.module).__name__}. HINT: "
                "build optimizers in configure_optimizers, from `self.parameters()` or `self.named_parameters()`, and "
                "ask only for modules that are part of it."
            ) from None

    def lent_to_rank_zero(self) -> AbstractContextManager[bool]:
        """Rank 0's module shows whole host values in their own dtype, as a single process would have them. Collective.

        Yields:
            Whether this is rank 0.
        """
        return lent_to_rank_zero(self)

    def rewritten(self) -> AbstractContextManager[None]:
        """Every rank's module shows whole host values in their own dtype, and what it then holds is kept. Collective.

        All ranks must write the same.
        """
        return rewritten(self)

    def close(self) -> None:
        """Give the module its whole values back, in their own dtype on the host, and remove every hook. Collective.

        The optimizers' states stay readable through :func:`optimizer_state_dict`.
        """
        self.settle()
        self.abandon()
        for flat in self.flats:
            flat.lend()
            flat.forsake()

    def abandon(self) -> None:
        """Remove every hook without talking to other ranks; parameters that are released stay so."""
        self._reset()
        self._descent.cancel()
        for flat in self.flats:
            flat.cancel_update()
        self._backward.close()
        for unit in self.units:
            unit.close()
        for shards in self.optimizers:
            shards.detach()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _on_need(self, unit: Unit) -> None:
        if not self.evaluation.is_running:
            self._ascent.need(unit)
        elif self.evaluation.is_joint and not unit.is_whole:
            self.evaluation.gather(unit)
        else:
            for flat in unit.flats:
                flat.gather()

    def _keeps(self, unit: Unit) -> bool:
        return self._ascent.keeps(unit)

    def _on_reach(self, unit: Unit) -> None:
        self._backward.reach(unit)

    def _reset(self) -> None:
        self.is_in_step = False
        self._drop_backward()
        self._backward.reset()
        for flat in self.flats:
            flat.cancel_arrival()
        for unit in self.units:
            unit.settle()
        self._let_rest_go()

    def _drop_backward(self) -> None:
        """Forget a backward that was interrupted, and what it was to be added to: that may hold a part of it."""
        if self._in_backward:
            self._in_backward = False
            self._backward.reset()
            self._descent.cancel()
            for flat in self.flats:
                flat.drop()

    def _let_rest_go(self) -> None:
        if self._rest_is_held:
            self._rest_is_held = False
            for unit in self._rest:
                unit.let_go()
