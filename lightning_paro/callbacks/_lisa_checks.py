"""Where LISA cannot be right it is refused, where it cannot save all it could it is said, with what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lightning_paro.algorithms.anatomy import Anatomy
from lightning_paro.strategies import ParoStrategy

__all__ = [
    "check_asleep",
    "check_awake",
    "check_checkpointing",
    "check_compiled",
    "check_optimizers",
    "check_steps",
    "check_trainer",
    "check_units",
]


def check_trainer(trainer: Trainer, asked: str | None = None) -> None:
    """Refuse strategies and callbacks that layers cannot be frozen and woken under.

    Args:
        trainer: With its strategy and callbacks.
        asked: The argument of LISA that looks at shards of gradients or updates, if one does.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            "LISA cannot run under DeepSpeedStrategy: DeepSpeed decides once which parameters it trains, and gives "
            "optimizer state to all of them. HINT: Trainer(strategy='paro_nng') partitions like ZeRO-1, 'paro_ggg' "
            "like ZeRO-3."
        )
    if isinstance(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
        raise ValueError(
            "LISA trains other layers in every period, and static_graph=True says that the graph never changes. HINT: "
            "DDPStrategy() without static_graph."
        )
    if isinstance(strategy, DDPStrategy) and isinstance(strategy._ddp_comm_state, (PowerSGDState, PostLocalSGDState)):
        raise ValueError(
            f"a hook with {type(strategy._ddp_comm_state).__name__} makes up for what it did not send in later steps, "
            "when LISA has frozen those layers. HINT: a ddp_comm_hook without a memory, such as fp16_compress_hook, or "
            "none."
        )
    if isinstance(strategy, FSDPStrategy) and not strategy.kwargs.get("use_orig_params", True):
        raise ValueError(
            "FSDPStrategy(use_orig_params=False) merges the parameters of a unit, so LISA cannot freeze some of them. "
            "HINT: leave use_orig_params out, with one unit a layer (auto_wrap_policy={TheLayerClass})."
        )
    if isinstance(strategy, FSDPStrategy) and asked:
        raise ValueError(
            f"LISA({asked}) needs to know which part of a parameter a rank holds, which FSDPStrategy does not say. "
            f"HINT: ModelParallelStrategy or Trainer(strategy='paro_ggg'), or leave {asked} out."
        )
    others = [type(c).__name__ for c in trainer.callbacks if isinstance(c, BaseFinetuning)]  # type: ignore[attr-defined]
    if others:
        raise ValueError(f"LISA and {others[0]} both freeze and unfreeze layers. HINT: use one of them.")


def check_optimizers(trainer: Trainer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that no optimizer, or more than one, would update: they would never or doubly be trained."""
    held: dict[int, int] = {}
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS keeps one vector for all parameters, so what is frozen gives no state back. HINT: an optimizer "
                "that has state for each parameter, such as AdamW."
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                held[id(parameter)] = held.get(id(parameter), 0) + 1
    wrong = [name for name, parameter in parameters.items() if held.get(id(parameter)) != 1]
    if wrong:
        count = held.get(id(parameters[wrong[0]]), 0)
        raise ValueError(
            f"{count or 'no'} param groups hold '{wrong[0]}'"
            f"{f' ({len(wrong) - 1} more are wrong)' if len(wrong) > 1 else ''}, "
            "which LISA is to train; expected one. HINT: give all parameters to one optimizer in configure_optimizers: "
            "LISA freezes them later, so none is frozen yet when optimizers are built."
        )


def check_checkpointing(module: nn.Module, embeddings_train: bool) -> None:
    """Refuse reentrant activation checkpointing if what comes first may be frozen: nothing would be trained at all."""
    if embeddings_train or any(getattr(part, "_require_grads_hook", None) for part in module.modules()):
        return  # the hook of transformers' enable_input_require_grads, which PEFT sets, lets inputs require a gradient
    for part in module.modules():
        function = getattr(part, "_gradient_checkpointing_func", None)
        options = function.keywords if isinstance(function, functools.partial) else {}
        of_transformers = getattr(part, "gradient_checkpointing", False) and options.get("use_reentrant")
        of_torch = getattr(part, "checkpoint_impl", None) is CheckpointImpl.REENTRANT
        if of_transformers or of_torch:
            raise ValueError(
                "activation checkpointing with use_reentrant=True needs an input that requires a gradient, which "
                "frozen embeddings do not give: no layer would be trained. HINT: "
                'model.gradient_checkpointing_enable({"use_reentrant": False}), or leave the embeddings trainable, '
                'with train_embeddings="always".'
            )


def check_compiled(module: LightningModule, layers: Iterable[str]) -> None:
    """Say that a model which is compiled as a whole is compiled anew in every period."""
    names = set(layers)
    for name, part in module.named_modules():
        inside = [layer for layer in names if layer.startswith(f"{name}.")] if name else list(names)
        is_compiled = (
            isinstance(part, OptimizedModule)
            or getattr(part, "_compiled_call_impl", None) is not None
            or getattr(part, "_compiler_ctx", None) is not None  # a LightningModule, by torch.compile
        )
        if is_compiled and len(inside) > 1:
            rank_zero_warn(
                f"'{name or type(part).__name__}' is compiled as a whole and will be compiled anew for every set of "
                "layers that LISA trains, until torch gives up. HINT: compile each layer: `for layer in layers: "
                "layer.compile()` takes two variants."
            )


def check_awake(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what was frozen after LISA looked what it may train."""
    asleep = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if asleep:
        raise ValueError(
            f"'{asleep[0]}'{_more(asleep)} was frozen after LISA looked at the model, when training was set up. HINT: "
            "freeze it in __init__, configure_model or setup; LISA leaves frozen what it finds so."
        )


def check_steps(made: int, seen: int) -> None:
    """Refuse an optimizer that is stepped past Lightning: layers would never be switched."""
    if made > seen:
        raise RuntimeError(
            f"the optimizer has made {made} steps, of which Lightning, and so LISA, has seen {seen}. HINT: step what "
            "self.optimizers() returns without use_pl_optimizer=False; in optimizer_step, the optimizer as it is given."
        )


def check_asleep(parameters: Mapping[str, nn.Parameter], states: Collection[str]) -> None:
    """Refuse that something else trains, or holds state of, what is frozen.

    Args:
        parameters: What is frozen, by name.
        states: Names of the parameters whose state was not kept on purpose.
    """
    awake = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if awake:
        raise RuntimeError(
            f"LISA has frozen '{awake[0]}'{_more(awake)}, and now it requires a gradient again. HINT: leave "
            "requires_grad to LISA; where two optimizers take turns, Lightning's toggle_optimizer does."
        )
    left = [name for name in states if name in parameters]
    if left:
        raise RuntimeError(
            f"the optimizer holds state of '{left[0]}'{_more(left)}, which LISA has frozen: it makes state for "
            "parameters without a gradient. HINT: use an optimizer that makes it when it first steps, as torch's do, "
            'or state_policy="keep".'
        )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def check_units(trainer: Trainer, anatomy: Anatomy) -> None:
    """Say that a layer which shares a unit with others does not give back all it could."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParoStrategy):
        return
    for name, parameters in anatomy.layers.items():
        own = {id(parameter) for parameter in parameters.values()}
        for parameter in parameters.values():
            flat, _ = strategy.engine.locate(parameter)
            if any(id(slot.parameter) not in own for slot in flat.slots):
                rank_zero_warn(
                    f"layer '{name}' shares the unit '{flat.unit}' with other parameters, so its gradients and master "
                    "weights stay when LISA freezes it. HINT: leave ParoStrategy's `units` at 'auto', or give it the "
                    "class of the layers."
                )
                return
