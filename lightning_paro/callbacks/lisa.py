"""LISA: fine-tuning that trains embeddings, head and a few freshly drawn layers at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_paro.algorithms.anatomy import Anatomy, dissect
from lightning_paro.algorithms.sampling import Draw, Sampler, draw
from lightning_paro.callbacks import _lisa_checks as checks
from lightning_paro.callbacks._accord import in_accord
from lightning_paro.callbacks._budget import Budget
from lightning_paro.callbacks._heatmap import Period, write_heatmap, write_table
from lightning_paro.callbacks._lisa_arguments import check_arguments
from lightning_paro.callbacks._lisa_report import memory_report
from lightning_paro.callbacks._moments import Offloaded
from lightning_paro.callbacks._parts import Parts, When
from lightning_paro.callbacks._progress_text import ProgressText, short
from lightning_paro.callbacks._scores import GradientNorms, weight_norms
from lightning_paro.callbacks._sharded_checkpoint import expect_state_of_all, expect_state_of_some
from lightning_paro.callbacks._stepped import Stepped
from lightning_paro.callbacks._warmup import Warmup
from lightning_paro.state_access import StateAccess, no_longer_postponed, postpone_ddp, state_access

__all__ = ["LISA"]


class LISA(Callback):
    """Trains embeddings, head and ``num_layers`` other layers, drawn anew every ``interval`` optimizer steps.

    What is not trained has no gradient and no optimizer state: fine-tuning all of a model takes the memory of a small
    part of it. Param groups stay as configure_optimizers built them, so schedulers run on across periods.

    Reference: Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning",
    NeurIPS 2024, algorithm 1.

    Args:
        num_layers: How many layers are trained at a time (γ in the paper).
        interval: Optimizer steps of a period (K in the paper).
        layers: Where the layers are: ``"auto"`` finds them; or the path of the list that holds them, or several.
        sampler: ``"uniform"`` as in the paper; ``"cyclic"``: one permutation of all layers after the other;
            ``"weight_norm"`` or ``"grad_norm"``: in proportion to the norm of weights, or to a moving average of that
            of gradients, of which a tenth is uniform; or a callable from a
            :class:`~lightning_paro.algorithms.sampling.Draw` to the layers' numbers.
        state_policy: What becomes of the optimizer state of layers that are frozen. ``"drop_frozen"``: forgotten.
            ``"reset_all"``: at each switch all state is forgotten, that of embeddings and head as well, as in the
            paper's runs. ``"offload"``: moved to pinned host memory, and fetched when the layer wakes, ahead of the
            update that needs it. ``"keep"``: kept where it is, which grows to that of full fine-tuning.
        train_embeddings: ``"always"``; ``"sampled"``: as one more layer that may be drawn; ``"never"``.
        train_head: Likewise. A head that is tied to the embeddings counts as embeddings.
        warmup: After a layer was activated its j-th step is scaled by j / (warmup + 1), for this many steps: fresh
            moments make the first steps about four times as large as later ones.
        keep_master: Under ParoStrategy: keep the fp32 master weights of frozen layers. Without them what is smaller
            than the resolution of the compute dtype is lost whenever a layer is frozen.
        memory_budget: Bytes that a rank may use, or for example ``"20GiB"``: train as many layers as fit, with Adam,
            instead of ``num_layers``. On a GPU the first period trains one layer and shows what activations take;
            elsewhere weights, gradients and optimizer state count.
        seed: Of the draws, that of rank 0; no other generator is touched.

    Raises:
        ValueError: If an argument is not understood, or if the model, the optimizers or the strategy do not allow it;
            each message says what to do.

    Example::

        Trainer(callbacks=[LISA(num_layers=2, interval=20)], precision="bf16-true")
    """

    def __init__(
        self,
        num_layers: int = 2,
        interval: int = 20,
        layers: str | list[str] = "auto",
        sampler: Literal["uniform", "cyclic", "weight_norm", "grad_norm"] | Sampler = "uniform",
        state_policy: Literal["drop_frozen", "reset_all", "offload", "keep"] = "drop_frozen",
        train_embeddings: When = "always",
        train_head: When = "always",
        warmup: int = 0,
        keep_master: bool = False,
        memory_budget: int | str | None = None,
        seed: int = 0,
    ) -> None:
        check_arguments(locals())
        self.num_layers = num_layers
        self.interval = interval
        self.layers = layers
        self.sampler = sampler
        self.state_policy = state_policy
        self.train_embeddings = train_embeddings
        self.train_head = train_head
        self.warmup = warmup
        self.keep_master = keep_master
        self.memory_budget = memory_budget
        self._budget = None if memory_budget is None else Budget(memory_budget)
        self.seed = seed
        self.active: tuple[int, ...] = ()
        """Numbers of the layers that are trained now, in :attr:`names`."""
        self.names: list[str] = []
        """What is drawn from, by name of the layer's module."""
        self.periods: list[Period] = []
        """Number of each period so far, the optimizer steps before it, and the layers it trained."""
        self._parts = Parts(Anatomy({}, {}, {}, {}, tied=False), {}, "always", "always")
        self._is_on = False  # whether it may have frozen something
        self._steps = 0
        self._period = -1
        self._norms = GradientNorms(0)
        self._state_bytes = 0
        self._measured = -1  # the period in which state was last looked at
        self._cleared = 0  # steps whose gradients are gone
        self._resumed: Mapping[str, Any] | None = None
        self._counted = 0  # number of the optimizer whose steps count
        self._folder: str | None = None  # the logger's
        self._stepped, self._begun = Stepped(), 0  # and the steps before this run
        self._offloaded = Offloaded()
        self._ramp = Warmup(warmup)
        self._text = ProgressText("lisa", self._line)

    # ---- what the user may ask ------------------------------------------------------------------------------

    memory_report = staticmethod(memory_report)

    @property
    def active_layers(self) -> list[str]:
        """Names of the layers that are trained now."""
        return [self.names[index] for index in self.active]

    @property
    def trainable(self) -> int:
        """Number of parameters that are trained now."""
        return self._parts.trainable(self.active)

    # ---- set-up ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._resumed = None  # by a run that only evaluated
        if not trainer.global_step:  # a new run: what a tuner saves of it is not that of an earlier one
            self.names, self._period = [], -1
        warmup = f"warmup={self.warmup}" if self.warmup else None
        checks.check_trainer(trainer, 'sampler="grad_norm"' if self.sampler == "grad_norm" else warmup)
        if isinstance(trainer.strategy, DDPStrategy):
            layers: dict[str, nn.Parameter] = {}
            with contextlib.suppress(ValueError):  # they may not be there before configure_model
                for layer in dissect(pl_module, self.layers).layers.values():
                    layers |= layer
            with in_accord(
                "LISA", trainer.world_size, lambda: {"model": {name: p.numel() for name, p in layers.items()}}
            ):
                pass  # DDP would wait for ever for what a rank does not have
            postpone_ddp(pl_module, layers.values())

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with in_accord("LISA", trainer.world_size, self._described):
            self._prepare(trainer, pl_module)
        self.seed = trainer.strategy.broadcast(self.seed)  # ranks may have drawn it themselves
        expect_state_of_some(trainer.strategy, self._parts.all)

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a rank can do alone."""
        anatomy = dissect(pl_module, self.layers)
        self._offloaded = Offloaded()
        self._parts = parts = Parts(anatomy, state_access(trainer).sizes(), self.train_embeddings, self.train_head)
        names = parts.names
        if names != self.names or not trainer.global_step:  # not one that goes on
            self.names, self.periods, self.active = names, [], ()
            self._steps, self._period, self._norms, self._ramp = 0, -1, GradientNorms(len(names)), Warmup(self.warmup)
        if self._budget is not None and self._period < 0:
            self.num_layers = self._budget.begin(trainer, parts.counts())
        if self.num_layers > len(names):
            raise ValueError(
                f"num_layers={self.num_layers}, but there are {len(names)} layers to draw from: {_ends(names)}. HINT: "
                "fewer, or train all of the model without LISA."
            )
        if not (self.num_layers or parts.trainable(())):
            raise ValueError(
                f"num_layers=0, and nothing outside of the {len(names)} layers is trained. HINT: 1 or more."
            )
        checks.check_checkpointing(pl_module, self.train_embeddings == "always" and bool(anatomy.embeddings))
        checks.check_compiled(pl_module, anatomy.layers)
        checks.check_units(trainer, anatomy)
        checks.check_optimizers(trainer, parts.all)
        layers = {id(p) for p in parts.of(range(len(names))).values()}
        held = [{id(p) for group in o.param_groups for p in group["params"]} for o in trainer.optimizers]
        self._counted = next((number for number, ids in enumerate(held) if not ids.isdisjoint(layers)), 0)

    def _described(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        same = ("num_layers", "interval", "state_policy", "train_embeddings", "train_head", "warmup", "keep_master")
        asked = {name: getattr(self, name) for name in same}
        sampler = self.sampler if isinstance(self.sampler, str) else "own"
        return {"model": self._parts.sizes(), "sampler": sampler, "layers": self.names, **asked}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        expect_state_of_all(trainer.strategy)
        self._resume()
        checks.check_awake(self._parts.all)
        self._is_on = True
        if self._period < 0:
            period = self._steps // self.interval
            self._note(period, self._draw(trainer, pl_module, period))
        self._freeze(state_access(trainer), {**self._parts.others(self.active), **self._parts.never})
        self._ramp.attach(trainer.optimizers)
        self._stepped.attach(trainer.optimizers[self._counted])
        self._begun = self._steps
        self._text.show(trainer)
        self._measured, self._cleared = -1, self._steps
        self._folder = trainer.log_dir if trainer.loggers else None
        on_gpu = trainer.strategy.root_device.type == "cuda"
        fits = "" if self._budget is None or self._budget.is_open else f", which fit into {self.memory_budget}"
        rank_zero_info(
            f"LISA trains {self.trainable:,} of {self._parts.trainable(range(len(self.names))):,} parameters at a "
            f"time, {self.num_layers} of {len(self.names)} layers{fits}, for {self.interval} steps each."
            + " Activations, which come on top, are counted on a GPU only."
            * (bool(fits) and not on_gpu)
        )

    # ---- training -------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        period = self._steps // self.interval
        if period != self._period:  # only after a step: never in the middle of an accumulation
            self._switch(trainer, pl_module, period)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._offloaded.arrive()
        self._ramp.begin(state_access(trainer), optimizer, {index: self._parts.layers[index] for index in self.active})
        if optimizer is trainer.optimizers[self._counted]:
            if self.sampler == "grad_norm":
                self._norms.observe(state_access(trainer), self._parts.layers, self.active)
            self._steps += 1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        checks.check_steps(self._stepped.count, self._steps - self._begun)
        if pl_module.automatic_optimization and self._steps != self._cleared:
            self._cleared = self._steps
            for optimizer in trainer.optimizers:  # Lightning does it after the next forward, whose peak they add to
                pl_module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        if self._measured != self._period and self._steps > self._period * self.interval:
            self._measured = self._period
            self._measure(state_access(trainer))
        seen = {f"lisa/active_{place}": index for place, index in enumerate(self.active)}
        seen |= {"lisa/trainable": self.trainable, "lisa/state_bytes": self._state_bytes}
        if not trainer.barebones:
            # on the host: a number would be copied to the device, for which the host would wait
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.items()}
            pl_module.log_dict(values, batch_size=1)  # of no use for one step's values, but Lightning may ask for it

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wake()
        if self._folder is not None and trainer.is_global_zero and self.periods:
            write_heatmap(self._folder, trainer.loggers, self.names, self.periods)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """For a run that was set up and did not begin, as a tuner's."""
        self._wake()
        expect_state_of_all(trainer.strategy)
        no_longer_postponed(pl_module)

    def _wake(self) -> None:
        """Leave everything as the user had it; no rank waits for another here."""
        for parameter in self._parts.all.values() if self._is_on else ():
            parameter.requires_grad_(True)
        self._is_on = False
        self._ramp.detach()
        self._stepped.detach()
        self._text.hide()

    # ---- switching ------------------------------------------------------------------------------------------

    def _switch(self, trainer: Trainer, pl_module: LightningModule, period: int) -> None:
        """Freeze what is done, wake what comes."""
        access = state_access(trainer)
        if self._budget is not None and self._budget.is_open and self._steps > 1:  # state is there after the first
            self.num_layers = self._budget.choose(trainer, self._parts.counts())
            rank_zero_info(f"LISA trains {self.num_layers} layers at a time, which fit into {self.memory_budget}.")
        chosen = self._draw(trainer, pl_module, period)
        leaving = self._parts.of(i for i in self.active if i not in chosen)
        coming = self._parts.of(i for i in chosen if i not in self.active)
        self._freeze(access, leaving)
        if self.state_policy == "reset_all":
            access.drop_state(self._parts.all.values())
            self._ramp.stay(())
        access.set_trainable(coming.values(), True)
        if self.state_policy == "offload":
            self._offloaded.fetch(access.optimizer_state(coming.values()), pl_module.device)  # until the first update
        self._note(period, chosen)
        if self._folder is not None and trainer.is_global_zero:
            write_table(self._folder, self.names, self.periods)

    @property
    def _keeps(self) -> bool:
        return self.state_policy in ("keep", "offload")

    def _freeze(self, access: StateAccess, parameters: Mapping[str, nn.Parameter]) -> None:
        access.set_trainable(parameters.values(), False, keep_master=self.keep_master, keep_state=self._keeps)
        if self.state_policy == "offload":
            self._offloaded.evict(access.optimizer_state(parameters.values()))

    def _note(self, period: int, chosen: tuple[int, ...]) -> None:
        self._ramp.stay(index for index in chosen if index in self.active)
        self.active, self._period = chosen, period
        self.periods.append((period, self._steps, chosen))

    # ---- drawing --------------------------------------------------------------------------------------------

    def _draw(self, trainer: Trainer, pl_module: LightningModule, period: int) -> tuple[int, ...]:
        """The layers of a period, the same on all ranks."""
        scores: Sequence[float] = ()
        if self.sampler == "weight_norm":
            modules = dict(pl_module.named_modules(remove_duplicate=False))  # one may have another name before
            parts = [modules[name] if name not in ("embeddings", "head") else None for name in self.names]
            scores = weight_norms(state_access(trainer), parts, self._parts.layers)
        elif self.sampler == "grad_norm":
            scores = self._norms.scores()
        chosen = draw(self.sampler, Draw(period, len(self.names), self.num_layers, self.seed), scores)
        if callable(self.sampler) or scores:  # what a rank computed itself may differ in the last bit, or be random
            chosen = tuple(trainer.strategy.broadcast(chosen))
        return chosen

    # ---- what it shows --------------------------------------------------------------------------------------

    def _measure(self, access: StateAccess) -> None:
        """Bytes of optimizer state on this rank's device; nothing frozen may be among them."""
        states = access.optimizer_state(self._parts.all.values())
        asleep = self._parts.others(self.active)
        checks.check_asleep({**asleep, **self._parts.never}, () if self._keeps else states)
        away = asleep if self.state_policy == "offload" else ()
        here = [state for name, state in states.items() if name not in away]
        self._state_bytes = sum(v.nbytes for state in here for v in state.values() if isinstance(v, Tensor))

    def _line(self) -> str:
        layers = ",".join(str(index) for index in self.active) or "none"
        return f"{layers} ({short(self.trainable)}, {short(self._state_bytes, 'B')})"

    # ---- checkpoints ----------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        self._offloaded.synchronize()
        return {
            "drawn_by": self._drawn_by(),
            "names": list(self.names),
            "num_layers": self.num_layers,
            "is_budget_open": self._budget is not None and self._budget.is_open,
            "steps": self._steps,
            "period": self._period,
            "active": list(self.active),
            "ramp": self._ramp.state_dict(),
            "norms": self._norms.state_dict(),
            "periods": list(self.periods),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _drawn_by(self) -> list[Any]:
        return [self.seed, self.interval, self.num_layers, self.sampler if isinstance(self.sampler, str) else "own"]

    def _resume(self) -> None:
        saved, self._resumed = self._resumed, None
        if saved is None or saved["period"] < 0:  # of a run that had not begun
            return
        if saved["names"] != self.names:
            raise ValueError(
                f"the checkpoint's LISA drew from {len(saved['names'])} layers, {_ends(saved['names'])}; this model "
                f"has {len(self.names)}, {_ends(self.names)}. HINT: build the model and LISA(layers=...) as in the run "
                "that was saved, or load only the weights."
            )
        self._steps, self._period = saved["steps"], saved["period"]
        self.active = tuple(saved["active"])
        self._ramp.load_state_dict(saved["ramp"])
        self._norms.load_state_dict(saved["norms"])
        if self._budget is not None:
            self.num_layers, self._budget.is_open = saved["num_layers"], saved["is_budget_open"]
        self.periods = [(number, step, tuple(active)) for number, step, active in saved["periods"]]
        if saved["drawn_by"] != self._drawn_by():
            kinds = zip(("seed", "interval", "num_layers", "sampler"), saved["drawn_by"], self._drawn_by(), strict=True)
            told = ", ".join(f"{kind} was {then!r} and is {now!r}" for kind, then, now in kinds if then != now)
            rank_zero_info(f"LISA draws layers anew after the checkpoint: {told}.")
            self._period = -1


def _ends(names: Sequence[str]) -> str:
    return f"'{names[0]}' to '{names[-1]}'" if names else "none"
