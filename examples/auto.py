"""Let the guideline choose for a small GPT-2, in four processes that stand for two hosts, and resume with its choice.

    python examples/auto.py

The network between the processes is measured once, and kept in the user's cache folder. By the formulas, computation
hides all communication between processes of one machine: all partitions are equally fast, and the one of the least
memory is chosen.
"""

from __future__ import annotations

from pathlib import Path

from byte_gpt import ByteGPT, StandardLibrary
from lightning.pytorch import Trainer, seed_everything

from lightning_paro import ParoStrategy

CHECKPOINT = Path("checkpoints/auto.ckpt")
STEPS = 5


def train(strategy: ParoStrategy, steps: int, resume: Path | None = None) -> Trainer:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        accumulate_grad_batches=2,
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(), StandardLibrary(), ckpt_path=resume, weights_only=True)
    trainer.print(f"{trainer.global_step} steps, with paro_{trainer.strategy.partition}")
    return trainer


def main() -> None:
    seed_everything(1, verbose=False)
    trainer = train(ParoStrategy("auto", group_size=2), STEPS)
    trainer.save_checkpoint(CHECKPOINT, weights_only=False)
    # the choice is the checkpoint's, whatever would be chosen now; reprobe=True would choose again
    train(ParoStrategy("auto", group_size=2, compute=0.0, activations=0), 2 * STEPS, CHECKPOINT)


if __name__ == "__main__":
    main()
