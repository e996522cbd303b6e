"""The Lightning Strategy: it brackets Lightning's hooks for the engine and decides nothing about sharding itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_paro.collectives import BUCKET_BYTES, ProcessGroups
from lightning_paro.sharding import Engine, load_optimizer_state_dict, optimizer_state_dict
from lightning_paro.strategies._activations import checkpoint_activations, module_classes
from lightning_paro.strategies._auto import AutoPartition
from lightning_paro.strategies._callbacks import with_parameters
from lightning_paro.strategies._checks import check_placement, check_state_dict, check_trainer
from lightning_paro.strategies._failure import FailureWatch
from lightning_paro.strategies._live import engine_of, forget, keep
from lightning_paro.strategies._lockstep import Lockstep
from lightning_paro.strategies._materialize import has_meta_tensors, materialize
from lightning_paro.strategies._processes import ProcessesStrategy, one_of
from lightning_paro.strategies._sigterm import stop_together
from lightning_paro.strategies.precision import adopt, policy_for
from lightning_paro.topology import Partition, Topology

__all__ = ["ParoStrategy"]


class ParoStrategy(ProcessesStrategy):
    """Data-parallel training with parameters, gradients and optimizer state each partitioned as it pays.

    Reference: Zhang et al., "Rethinking Memory and Communication Costs for Efficient Data Parallel Training of Large
    Language Models", NeurIPS 2024.

    Args:
        partition: Three letters for parameters, gradients and optimizer state: ``n`` whole on every rank, ``i``
            partitioned inside a group, ``g`` partitioned globally. One of the 14 whose optimizer state is the finest.
            Or ``"auto"``: the fastest that fits, found out when training starts and kept in its checkpoints.
        group_size: Ranks per group; must divide the world size. None is the number of ranks of one host.
        units: What is gathered together: ``"auto"`` (the repeated blocks of the model, the rest as units of their own),
            a collection of module classes, or a callable that says which modules are units.
        bucket_bytes: Neighbouring units travel by one launch up to this many bytes, whole and in the compute dtype.
            Larger buckets cost less time; two of them are whole at once. 0 moves every unit by itself.
        grad_dtype: Dtype of the gradient accumulator, ``"float32"`` or ``"bfloat16"``; None is the precision's own.
        reduce_dtype: Wire dtype of gradients; None is the precision's own.
        nonfinite: What a step does if a gradient is not finite on some rank: ``"propagate"`` it as DDP does,
            ``"skip"`` the step on all ranks, or ``"raise"`` on all ranks.
        timeout: How long a collective may wait.
        start_method: How Lightning starts the processes: ``"popen"`` runs the script again, the others fork or spawn
            (for notebooks and tests). Under torchrun or SLURM, which start them, it does not matter.
        activation_checkpointing: Module classes whose activations are recomputed in backward (non-reentrant).
        memory: For ``"auto"``: bytes that a rank may use; None is what is free.
        compute: For ``"auto"``: seconds of forward and backward of one micro-batch; None measures them.
        activations: For ``"auto"``: bytes of activations of one micro-batch; None measures them.
        example_batch: For ``"auto"``: the batch to measure with; None is the first of the training dataloader.
        reprobe: For ``"auto"``: measure the network again and decide anew, whatever a checkpoint says.
        process_group_backend: ``"nccl"``, ``"gloo"`` or None for the device's default.
        accelerator: As in Lightning's strategies.
        parallel_devices: As in Lightning's strategies.
        cluster_environment: As in Lightning's strategies.
        checkpoint_io: As in Lightning's strategies.
        precision_plugin: As in Lightning's strategies.

    Raises:
        ValueError: If an argument is not understood; each message says what is expected.

    Example::

        trainer = Trainer(strategy=ParoStrategy("iig", group_size=4), devices=8, precision="bf16-mixed")
    """

    def __init__(
        self,
        partition: str = "iig",
        *,
        group_size: int | None = None,
        units: Literal["auto"] | list[type[nn.Module]] | set[type[nn.Module]] | Callable[[nn.Module], bool] = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        grad_dtype: Literal["float32", "float64", "bfloat16"] | None = None,
        reduce_dtype: Literal["float32", "float64", "bfloat16"] | None = None,
        nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        activation_checkpointing: type[nn.Module] | list[type[nn.Module]] | set[type[nn.Module]] | None = None,
        memory: float | None = None,
        compute: float | None = None,
        activations: float | None = None,
        example_batch: Any = None,
        reprobe: bool = False,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        options = {"memory": memory, "compute": compute, "activations": activations, "example_batch": example_batch}
        self._auto = AutoPartition.read(partition, **options, reprobe=reprobe)
        self.partition: Partition | str = "auto" if self._auto else Partition.parse(partition)
        self.group_size = group_size
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={bucket_bytes!r} must be a number of bytes, 0 or more.")
        one_of("nonfinite", nonfinite, ("propagate", "skip", "raise"))
        self._units = units
        self._bucket_bytes = bucket_bytes
        self._grad_dtype = grad_dtype
        self._reduce_dtype = reduce_dtype
        self._nonfinite = nonfinite
        self._checkpointed = module_classes("activation_checkpointing", activation_checkpointing)
        self._groups: ProcessGroups | None = None
        self._engine: Engine | None = None
        self._trained: Engine | None = None  # whose optimizers these are; a later validate has an engine of its own
        self._watch: FailureWatch | None = None
        self._undo: list[Callable[[], object]] = []
        self._failed = False
        self._runs = 0

    # ---- what the user may ask ------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine of the current run.

        Raises:
            RuntimeError: Outside of fit, validate, test and predict.
        """
        if self._engine is None:
            raise RuntimeError(
                "the model is not sharded yet. HINT: this is available from `on_fit_start` on, inside a run of the "
                "Trainer."
            )
        return self._engine

    def grad_norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """The 2-norm of the gradient of all parameters, the same on all ranks. Collective: call it on every rank.

        Callable from ``on_before_optimizer_step`` on, until gradients are cleared.

        Args:
            optimizer: Only the parameters of this optimizer; None for all.

        Returns:
            A scalar tensor.
        """
        self.engine.meet("computing the norm of the gradient")
        return self.engine.grad_norm(optimizer)

    @contextmanager
    def full_parameters(self, module: nn.Module | None = None, writeback: bool = False) -> Generator[None]:
        """Whole parameter values on every rank inside the context. Collective: enter it on every rank.

        Args:
            module: Only the parameters of this submodule; None for all.
            writeback: Keep the changes rank 0 made; without it they are lost.
        """
        with self.engine.full_parameters(module, writeback):
            yield

    # ---- set-up and teardown --------------------------------------------------------------------------------

    def _topology(self) -> Topology:
        return Topology(self.world_size, self.num_processes if self.group_size is None else self.group_size)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._topology()  # a wrong group size is refused before any process is started

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        topology = self._topology()
        warning = check_placement(topology.group_size, self.num_processes, self.num_nodes)
        if warning:
            rank_zero_warn(warning)
        self._groups = ProcessGroups.create(topology, self._timeout)
        self._failed = False
        self._runs += 1
        if topology.world_size > 1:
            self._watch = FailureWatch(self._groups, self._timeout)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else adopt(plugin)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self._lightning_optimizers = [LightningOptimizer._to_lightning_optimizer(opt, self) for opt in optimizers]
        for wrapper in self._lightning_optimizers:
            _delegate(wrapper)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        # on the host: the engine moves one unit at a time to the device
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def model_to_device(self) -> None:
        """Move buffers and metric states; parameters are moved, flat by flat, when they are sharded."""
        assert self.model is not None
        device = self.root_device
        self.model._apply(lambda t: t if isinstance(t, nn.Parameter) else t.to(device))

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self._groups is not None
        module: LightningModule = self.lightning_module
        check_trainer(trainer, module)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn is TrainerFn.FITTING
        stale = forget(module)
        if stale is not None:
            stale.close()
        materialize(module, initialize=self.global_rank == 0 or self._auto is not None)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._undo += checkpoint_activations(module, self._checkpointed)
        policy = policy_for(self.precision_plugin, self._grad_dtype, self._reduce_dtype)
        if self._auto is not None:
            self.partition = self._auto.decide(trainer, module, self._groups, policy, self._units, self._bucket_bytes)
        assert isinstance(self.partition, Partition)
        self._engine = Engine(
            module,
            self.partition,
            self._groups,
            policy=policy,
            units=self._units,
            bucket_bytes=self._bucket_bytes,
            device=self.root_device,
            nonfinite=self._nonfinite,
        )
        keep(module, self._engine)
        lockstep = Lockstep(self._engine, self.on_exception)
        trainer.callbacks.insert(0, lockstep)  # type: ignore[attr-defined]
        self._undo.append(lambda: trainer.callbacks.remove(lockstep))  # type: ignore[attr-defined]
        self._undo += stop_together(trainer, self._engine)
        self.precision_plugin.engine = self._engine  # type: ignore[attr-defined]
        if trainer.state.stage is not None and self._runs == 1:
            self._say_what_runs(self.partition)
        if fitting:
            self.setup_optimizers(trainer)
            self._trained = self._engine
            for optimizer in self.optimizers:
                self._engine.attach(optimizer)
            self._undo += with_parameters(self._engine, module, trainer.callbacks)  # type: ignore[attr-defined]
        self.setup_precision_plugin()

    def _say_what_runs(self, partition: Partition) -> None:
        engine = self.engine
        line = engine.topology.explain(partition, engine.model_state_bytes())
        if line:
            rank_zero_info(line)
        frozen = engine.rounded_frozen()
        if frozen:
            rank_zero_info(f"{frozen:,} frozen parameters are kept in the compute dtype {engine.policy.param_dtype}.")

    @override
    def teardown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        module = self.lightning_module
        if self._engine is not None and module is not None and engine_of(module) is not None:
            if self._failed:  # the other ranks may be gone: no collective
                self._engine.abandon()
            else:
                self._engine.close()
                forget(module)
        while self._undo:
            self._undo.pop()()
        fitting = module is not None and module._trainer is not None and module.trainer.state.fn is TrainerFn.FITTING
        if fitting and self._layer_sync and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        if not self._failed:
            _states_to_host(self.optimizers)
            if module is not None:
                module.cpu()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._watch is not None:
            self._watch.publish(exception)

    # ---- brackets -------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        assert self.lightning_module is not None
        engine.step_begin()
        try:
            output = super().training_step(*args, **kwargs)
        except BaseException:
            engine.abort()
            raise
        engine.step_end(backward_follows=self.lightning_module.automatic_optimization)
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.engine.backward_begin()  # the precision plugin ends it

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        """Backwards inside the context only accumulate, at the rung of the gradients."""
        engine = self.engine
        previous, engine.sync_gradients = engine.sync_gradients, False
        try:
            yield
        finally:
            engine.sync_gradients = previous

    @override
    def on_validation_start(self) -> None:
        self.engine.evaluation.begin()  # ranks may run different numbers of forwards: generate(), uneven batches

    @override
    def on_validation_end(self) -> None:
        self.engine.evaluation.end()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # ---- checkpoints ----------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model's state on rank 0, on the host, in the dtype of a single process; empty elsewhere."""
        assert self.lightning_module is not None
        if engine_of(self.lightning_module) is None:
            return self.lightning_module.state_dict() if self.is_global_zero else {}
        with self.engine.lent_to_rank_zero() as here:
            return self.lightning_module.state_dict() if here else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer's state on rank 0, as in a single process; empty elsewhere."""
        assert self._trained is not None
        return optimizer_state_dict(self._trained, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._auto is not None:
            self._auto.store(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if self._auto is not None:
            self._auto.restore(checkpoint)
        engine = engine_of(module)
        if engine is not None and (engine is not self._engine or self._failed):  # of a run that failed
            forget(module)
            engine.close()
            engine = None
        if has_meta_tensors(module):
            materialize(module, initialize=True)
        with nullcontext() if engine is None else engine.rewritten():  # in the middle of a run, as lr_find does it
            check_state_dict(module, checkpoint["state_dict"], strict)
            super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) not in (0, len(self.optimizers)):
            raise ValueError(
                f"the checkpoint holds {len(states)} optimizers, configure_optimizers returned {len(self.optimizers)}. "
                "HINT: return the optimizers of the run that was saved, or load only the weights."
            )
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_optimizer_state_dict(self.engine, optimizer, state)


def _delegate(wrapper: LightningOptimizer) -> None:
    """Let Lightning's wrapper use its optimizer's own methods; it inherits those of the class, which know no shards."""
    optimizer = wrapper.optimizer
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(wrapper, name, lambda *args, _name=name, **kwargs: getattr(optimizer, _name)(*args, **kwargs))


def _states_to_host(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.cpu()
