"""SIGTERM to any rank stops all of them after the same step, without a collective of its own.

Lightning asks rank 0 before every training batch, over the device, and waits for the answer; a rank other than 0 that
is told to end leaves the others behind. Here the word goes with what ranks agree on at a boundary anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_paro.sharding import Engine

__all__ = ["stop_together"]


def stop_together(trainer: Trainer, engine: Engine) -> list[Callable[[], object]]:
    """Replace Lightning's way for one run of ``fit``; returns what undoes it.

    Args:
        trainer: The Trainer, before it registers its signal handlers.
        engine: The engine of the run.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    if trainer.state.fn is not TrainerFn.FITTING:
        return []

    def told(signum: int, frame: FrameType | None) -> None:
        """The handler: the processes that this one launched are told, and the others at the next boundary."""
        if engine.accord.wants_to_stop:
            return
        engine.accord.wants_to_stop = True
        print(
            f"lightning_paro: rank {trainer.global_rank} received signal {signum}: all ranks stop after this step.",
            file=sys.stderr,
            flush=True,
        )
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)

    def ask() -> None:
        """Before a training batch."""
        if engine.accord.all_stop:
            connector.received_sigterm = True
            raise SIGTERMException

    replaced = ((connector, "_sigterm_notifier_fn", told), (loop, "_broadcast_sigterm_tensor", ask))
    for owner, name, method in replaced:
        setattr(owner, name, method)
    return [partial(delattr, owner, name) for owner, name, _ in replaced]
