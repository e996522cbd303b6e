"""The script that test_failures.py starts: one rank of two fails in some way in the middle of training."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_paro import ParoStrategy
from tests.conformance.support import Regressor, rank, trainer


class Failing(Regressor):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if rank() == 1 and batch_idx == 2 and self.how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif rank() == 1 and batch_idx == 2:
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
        callbacks = [OnExceptionCheckpoint(root)] if how in ("save", "sigterm") else []
        settings = {"devices": 2, "callbacks": callbacks, "enable_checkpointing": bool(callbacks)}
        run = trainer(ParoStrategy("iig", group_size=1), root, **settings)
        try:
            run.fit(Failing(how))
        except SystemExit:
            saved = torch.load(f"{root}/on_exception.ckpt", weights_only=False)["global_step"] if rank() == 0 else "-"
            print(f"rank {rank()} stopped after step {run.global_step}, saved step {saved}", flush=True)
            raise
    print("came through", flush=True)
