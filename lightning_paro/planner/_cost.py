"""What a partition costs: bytes a rank holds and seconds a step communicates (PaRO, sections 3.3 and 3.4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_paro.collectives import BUCKET_BYTES
from lightning_paro.topology import Granularity, Partition, Topology

__all__ = ["Cost", "Network", "StateBytes", "Workload", "cost", "hpz"]

N, I, G = Granularity  # noqa: E741

LARGEST, SLOWEST = 1e30, 1.0
"""Beyond these an input is a mistake, and times would not be numbers any more."""

Algorithm = Literal["flat", "paro-cc"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter, in memory and on the wire: a row of the precision table of docs/paro.md.

    Attributes:
        parameters: w, the compute dtype, in which parameters are held and gathered.
        gradients: q, the accumulator.
        optimizer: o, master weights and Adam's two moments.
        intra: A gradient on the wire inside a group.
        inter: A gradient on the wire between groups.
        copied: What w counts only because the compute dtype is not that of the master weights.
    """

    parameters: float = 2
    gradients: float = 4
    optimizer: float = 12
    intra: float = 2
    inter: float = 2
    copied: float = 2

    @classmethod
    def of(cls, precision: str, grad_dtype: str | None = None, reduce_dtype: str | None = None) -> StateBytes:
        """The bytes of a ``Trainer(precision=...)`` and of ParoStrategy's arguments of the same names.

        Raises:
            ValueError: If the precision is not known, or a dtype does not fit it.
        """
        if precision not in _PRECISIONS:
            raise ValueError(f"precision={precision!r} is not known: expected one of {', '.join(_PRECISIONS)}.")
        w, q, o, intra, inter, copied = _PRECISIONS[precision]
        if grad_dtype is not None:
            q = _SIZES[fitting_dtype("grad_dtype", grad_dtype, precision)]
        if reduce_dtype is not None:
            intra = inter = _SIZES[fitting_dtype("reduce_dtype", reduce_dtype, precision)]
        return cls(w, q, o, intra, inter, copied)


_PRECISIONS = {
    "bf16-mixed": (2, 4, 12, 2, 2, 2),
    "bf16-true": (2, 2, 4, 2, 2, 0),
    "16-mixed": (2, 4, 12, 2, 4, 2),
    "32-true": (4, 4, 8, 4, 4, 0),
    "64-true": (8, 8, 16, 8, 8, 0),
}
_FITTING = {"32-true": ("float32",), "64-true": ("float64",), "16-mixed": ("float32",)}
_SIZES = {"bfloat16": 2, "float32": 4, "float64": 8}


def fitting_dtype(argument: str, value: object, precision: str) -> str:
    """The name of a dtype in which gradients can be accumulated, or travel, in a precision.

    Raises:
        ValueError: If they cannot.
    """
    name = str(value).removeprefix("torch.")
    fitting = _FITTING.get(precision, ("float32", "bfloat16"))
    if name not in fitting:
        raise ValueError(
            f"{argument}={name!r} does not fit precision {precision!r}: expected {' or '.join(map(repr, fitting))}. "
            f"HINT: leave {argument} out to get the default of the precision table."
        )
    return name


@dataclass(frozen=True)
class Network:
    """A topology and how fast its links are.

    Attributes:
        topology: Ranks and groups.
        inter: Bytes per second out of a host, in one direction.
        intra: Bytes per second between two ranks of a group.
        nic: Whether the ranks of a host share one network card (``"host"``) or have one each (``"gpu"``).
        column: Bytes per second between two ranks of a column while all columns are busy, if that was measured; None
            is what ``nic`` says, a share of ``inter`` or all of it.
        ring: Bytes per second that each rank sends in a flat ring over all ranks, if that was measured; None is
            ``inter``.

    Raises:
        ValueError: If a bandwidth is not positive.
    """

    topology: Topology
    inter: float
    intra: float
    nic: Literal["host", "gpu"] = "host"
    column: float | None = None
    ring: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.bandwidths.items():
            if value is not None and not value >= SLOWEST:
                raise ValueError(
                    f"the bandwidth {name} must be at least {SLOWEST:g} byte per second, got {value}. "
                    "HINT: give bytes per second."
                )
        if self.nic not in ("host", "gpu"):
            raise ValueError(f"nic={self.nic!r} is not understood: expected 'host' or 'gpu'.")

    @property
    def bandwidths(self) -> dict[str, float | None]:
        """Bytes per second by name; None where what was given stands in for it."""
        return {"inter": self.inter, "intra": self.intra, "column": self.column, "ring": self.ring}

    def inside(self, nbytes: float) -> float:
        """Seconds to gather or reduce a tensor of ``nbytes`` over a group."""
        m = self.topology.group_size
        return nbytes * (m - 1) / m / self.intra

    def between(self, nbytes: float) -> float:
        """Seconds for the I-shards of a tensor of ``nbytes`` between groups, all columns at once."""
        m, ng = self.topology.group_size, self.topology.num_groups
        column = self.column or (self.inter if self.nic == "gpu" else self.inter / m)
        return nbytes / m * (ng - 1) / ng / column

    def globally(self, intra_bytes: float, inter_bytes: float, algorithm: Algorithm) -> float:
        """Seconds to gather or reduce a tensor over all ranks.

        Args:
            intra_bytes: Its size in the dtype of the wire inside a group.
            inter_bytes: Its size in the dtype of the wire between groups; a flat ring has only this one.
            algorithm: ``"flat"``, one ring over all ranks, which leaves a host through one card; or ``"paro-cc"``, one
                collective inside a group and one between groups, one after the other.
        """
        n, m, ng = self.topology.world_size, self.topology.group_size, self.topology.num_groups
        if algorithm == "paro-cc" or m == 1 or ng == 1:
            return self.inside(intra_bytes) + self.between(inter_bytes)
        return inter_bytes * (n - 1) / n / (self.ring or self.inter)


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        parameters: Number of parameters, Psi.
        trainable: Number of those that are trained, Psi'; None for all.
        accumulate: Micro-batches a step, s.
        compute: Seconds of forward and backward of one micro-batch on one rank, t_comp.
        activations: Bytes of activations on a rank.
        rest: Number of parameters outside all units, which stay gathered for a whole step.
        largest_unit: Number of parameters of the largest unit.
        sizes: Bytes per parameter.
        bucket_bytes: What moves by one launch, whole, as ParoStrategy's.

    Raises:
        ValueError: If a number makes no sense.
    """

    parameters: float
    trainable: float | None = None
    accumulate: int = 1
    compute: float = 0.0
    activations: float = 0.0
    rest: float = 0.0
    largest_unit: float = 0.0
    sizes: StateBytes = field(default_factory=StateBytes)
    bucket_bytes: float = BUCKET_BYTES

    def __post_init__(self) -> None:
        if not 0 < self.parameters <= LARGEST:
            raise ValueError(
                f"the number of parameters must be above 0 and at most {LARGEST:g}, got {self.parameters}."
            )
        if self.trainable is not None and not 0 <= self.trainable <= self.parameters:
            raise ValueError(
                f"{self.trainable:g} of {self.parameters:g} parameters cannot be trained. HINT: leave it out for all."
            )
        if not 1 <= self.accumulate <= LARGEST:
            raise ValueError(f"accumulate must be at least 1 micro-batch a step, got {self.accumulate}.")
        for name in ("compute", "activations", "rest", "largest_unit", "bucket_bytes"):
            if not 0 <= getattr(self, name) <= LARGEST:
                raise ValueError(f"{name} must be between 0 and {LARGEST:g}, got {getattr(self, name)}.")

    @property
    def trained(self) -> float:
        """Number of trained parameters."""
        return self.parameters if self.trainable is None else self.trainable


@dataclass(frozen=True)
class Cost:
    """What one rank holds, and how long one step takes.

    Attributes:
        state_bytes: Model state.
        memory_bytes: Model state, the largest units in motion, and activations.
        gather_s: Parameters, all micro-batches of a step.
        reduce_s: Gradients down to g, all micro-batches of a step.
        sync_g_s: Gradients from g down to os, once a step.
        sync_p_s: New values from os up to p, once a step.
        compute_s: Forward and backward, all micro-batches of a step.
        accumulate: Micro-batches a step.
    """

    state_bytes: float
    memory_bytes: float
    gather_s: float
    reduce_s: float
    sync_g_s: float
    sync_p_s: float
    compute_s: float
    accumulate: int

    @property
    def comm_s(self) -> float:
        """Seconds of communication in a step: (t_param + t_gradient) * s + t_update."""
        return self.gather_s + self.reduce_s + self.sync_g_s + self.sync_p_s

    @property
    def step_s(self) -> float:
        """Seconds of a step if communication and computation overlap as far as they can.

        What is sent once a step can hide only behind the last backward and the first forward, one micro-batch.
        """
        compute, often = self.compute_s / self.accumulate, (self.gather_s + self.reduce_s) / self.accumulate
        boundary = max(compute, often + self.sync_g_s + self.sync_p_s)
        return (self.accumulate - 1) * max(compute, often) + boundary


def cost(partition: Partition, workload: Workload, network: Network, algorithm: Algorithm = "paro-cc") -> Cost:
    """Memory and time of one partition.

    Args:
        partition: The granularities; in a topology without some rung, the neighbouring one counts.
        workload: What is trained.
        network: Where.
        algorithm: How a collective over all ranks is done.
    """
    partition = network.topology.effective(partition)
    sizes, s = workload.sizes, workload.accumulate
    new_values = workload.trained * sizes.parameters
    inside = network.inside(workload.trained * sizes.intra)
    between = network.between(workload.trained * sizes.inter)
    everywhere = network.globally(workload.trained * sizes.intra, workload.trained * sizes.inter, algorithm)

    gathered = (2 * workload.parameters - workload.rest) * sizes.parameters  # the rest only once a micro-batch
    gather = (0.0, network.inside(gathered), network.globally(gathered, gathered, algorithm))[partition.p]
    reduce = (0.0, inside, everywhere)[partition.g]
    sync_g = {
        (N, N): 2 * everywhere,
        (N, I): inside + 2 * between,
        (N, G): everywhere,
        (I, I): 2 * between,
        (I, G): between,
        (G, G): 0.0,
    }[partition.g, partition.os]
    sync_p = {
        (N, I): network.inside(new_values),
        (N, G): network.globally(new_values, new_values, algorithm),
        (I, G): network.between(new_values),
    }.get((partition.p, partition.os), 0.0)

    state = _state_bytes(partition, workload, network.topology)
    memory = state + _in_motion_bytes(partition, workload) + workload.activations
    return Cost(state, memory, gather * s, reduce * s, sync_g, sync_p, workload.compute * s, s)


def hpz(workload: Workload, network: Network) -> Cost:
    """ZeRO++ hpZ for comparison: ggg on flat rings, with a second copy of the parameters in each group for backward."""
    zero3 = cost(Partition.parse("ggg"), workload, network, "flat")
    values = workload.parameters * workload.sizes.parameters
    gather = workload.accumulate * (network.globally(values, values, "flat") + network.inside(values))
    copy = values / network.topology.group_size
    return replace(zero3, state_bytes=zero3.state_bytes + copy, memory_bytes=zero3.memory_bytes + copy, gather_s=gather)


def _state_bytes(partition: Partition, workload: Workload, topology: Topology) -> float:
    """M = w Psi / d(p) + q Psi' / d(g) + o Psi' / d(os), less what is cast from masters and not copied."""
    sizes = workload.sizes
    copied = sizes.copied * workload.trained if partition.p is partition.os is not N else 0.0
    return (
        (sizes.parameters * workload.parameters - copied) / topology.divisor(partition.p)
        + sizes.gradients * workload.trained / topology.divisor(partition.g)
        + sizes.optimizer * workload.trained / topology.divisor(partition.os)
    )


def _in_motion_bytes(partition: Partition, workload: Workload) -> float:
    """What is whole for a while: the rest, a bucket in use and one ahead; of gradients one filled and two on their way.

    Nothing is known of a model of which only the size is given.
    """
    units = workload.parameters - workload.rest
    if not workload.rest and not workload.largest_unit:
        return 0.0
    bucket = max(workload.largest_unit, workload.bucket_bytes / workload.sizes.parameters)
    gathered = workload.sizes.parameters * (workload.rest + min(2 * bucket, units)) if partition.p else 0.0
    share = workload.trained / workload.parameters
    reduced = workload.sizes.intra * share * min(3 * bucket, workload.parameters) if partition.g else 0.0
    return gathered + reduced
