"""The script that test_failures.py starts: one rank of two fails in some way in the middle of training."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_paro import ParoStrategy
from tests.conformance.support import Regressor, rank, trainer


class Failing(Regressor):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if rank() == 1 and batch_idx == 2:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the original error")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if rank() == 1 and self.how == "setup":
            raise ValueError("the original error")
        return super().configure_optimizers()


if __name__ == "__main__":
    how = sys.argv[1]
    with tempfile.TemporaryDirectory() as root:
        callbacks = [OnExceptionCheckpoint(root)] if how == "save" else []
        settings = {"devices": 2, "callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
        trainer(ParoStrategy("iig", group_size=1), root, **settings).fit(Failing(how))
    print("came through", flush=True)
