"""A byte-level GPT-2 and the text it learns: Python's own standard library. Plain Lightning, for any strategy."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class ByteGPT(LightningModule):
    """GPT-2 whose tokens are bytes.

    Args:
        context: How many bytes it sees at once.
        layers: Number of blocks.
        width: Size of the hidden state.
        heads: Attention heads per block.
        lr: Learning rate after the warm-up.
        warmup: Optimizer steps of warm-up.
    """

    def __init__(
        self, context: int = 128, layers: int = 4, width: int = 128, heads: int = 4, lr: float = 4e-3, warmup: int = 20
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=256,
            n_positions=context,
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            initializer_range=width**-0.5,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)

    def loss(self, text: Tensor) -> Tensor:
        """Cross entropy of every byte but the first, in nats."""
        logits = self.model(input_ids=text).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, text: Tensor) -> Tensor:
        loss = self.loss(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, text: Tensor) -> None:
        self.log("held_out", self.loss(text), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.hparams.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StandardLibrary(LightningDataModule):
    """The .py files of the running interpreter's standard library; one in ten, by a hash of its name, is held out.

    Args:
        context: Bytes per sample.
        batch_size: Samples per rank and batch.
        held_out_samples: How many samples of the held-out files make an evaluation.
    """

    def __init__(self, context: int = 128, batch_size: int = 4, held_out_samples: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        train, held_out = bytearray(), bytearray()
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not {"site-packages", "test", "tests"} & set(name.parts):
                one_in_ten = zlib.crc32(name.as_posix().encode()) % 10 == 0
                (held_out if one_in_ten else train).extend(path.read_bytes())
        self.train = Windows(train, self.hparams.context)
        self.held_out = Windows(held_out, self.hparams.context, self.hparams.held_out_samples)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.hparams.batch_size)


class Windows(Dataset):
    """A text cut into windows of ``size`` bytes; with a ``limit`` only so many, spread evenly."""

    def __init__(self, text: bytearray, size: int, limit: int | None = None) -> None:
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.size = size
        starts = range(0, len(text) - size + 1, size)
        self.starts = starts if limit is None else starts[:: max(len(starts) // limit, 1)][:limit]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.size].long()
