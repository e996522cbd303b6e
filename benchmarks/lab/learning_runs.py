"""Pre-train once, fine-tune from there in any way, and say what was learnt and what it took."""

from __future__ import annotations

import copy
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.lab.learning_arms import Arm, Run, Study
from benchmarks.lab.learning_text import batches, sources, topics, windows
from benchmarks.lab.lisa_memory import held
from lightning_paro.callbacks import LISA

__all__ = ["Lab", "build", "held_bytes"]

VOCABULARY = 256
LLAMA: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 352}
GPT2: dict[str, Any] = {"n_embd": 768, "n_layer": 12, "n_head": 12}
PRECISIONS: dict[str, Any] = {"cpu": "32-true", "cuda": "bf16-mixed"}


def build(shape: str, length: int) -> nn.Module:
    """The model of a shape, fp32, without dropout: random weights, the same every time."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    if shape == "small":
        return LlamaForCausalLM(LlamaConfig(**LLAMA, **ends, max_position_embeddings=length, tie_word_embeddings=False))
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**GPT2, **ends, **dropout, n_positions=length))


def held_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of all weights, of the gradients that are there, and of the optimizer's state."""
    parameters = list(module.parameters())
    state = (value for entries in optimizer.state.values() for value in entries.values())
    return {
        "weights": held(parameters),
        "gradients": held(parameter.grad for parameter in parameters),
        "states": held(value for value in state if isinstance(value, Tensor)),
    }


class Learner(LightningModule):
    """A language model of bytes, trained as the protocol says.

    Args:
        model: What is trained; parameters that require no gradient stay out of the optimizer.
        lr: Peak learning rate.
        steps: All there will be.
    """

    def __init__(self, model: nn.Module, lr: float, steps: int) -> None:
        super().__init__()
        self.model, self.lr, self.steps = model, lr, steps

    def training_step(self, text: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=text, labels=text).loss
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        fused = self.device.type == "cpu"  # on GPUs Lightning does not clip for a fused one in mixed precision
        optimizer = torch.optim.AdamW(trained, lr=self.lr, betas=(0.9, 0.999), weight_decay=0.01, fused=fused)
        warmup = self.steps // 10

        def factor(step: int) -> float:
            return min((step + 1) / warmup if warmup else 1.0, (self.steps - step) / (self.steps - warmup))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Held-out loss every so many steps, training loss between them, and the most bytes that were held.

    Args:
        held_out: Windows of text, ``(windows, length)``.
        every: Steps from one evaluation to the next.
    """

    def __init__(self, held_out: Tensor, every: int) -> None:
        self.held_out, self.every = held_out, every
        self.curve: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []
        self.bytes: dict[str, int] = {}
        self.trainable = 0
        self._since: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: Learner) -> None:
        self.evaluate(trainer, module)

    def on_before_optimizer_step(self, trainer: Trainer, module: Learner, optimizer: torch.optim.Optimizer) -> None:
        self._hold(module, optimizer)  # gradients may be gone when the batch ends

    def on_train_batch_end(self, trainer: Trainer, module: Learner, outputs: Any, batch: Tensor, _: int) -> None:
        self._since.append(outputs["loss"].detach())
        self._hold(module, trainer.optimizers[0])
        self.trainable = max(self.trainable, sum(p.numel() for p in module.parameters() if p.requires_grad))
        if trainer.global_step % self.every == 0:
            self.evaluate(trainer, module)

    def _hold(self, module: Learner, optimizer: torch.optim.Optimizer) -> None:
        sizes = held_bytes(module, optimizer)
        self.bytes = {part: max(size, self.bytes.get(part, 0)) for part, size in sizes.items()}

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, module: Learner) -> None:
        """Add a point to the curves."""
        with trainer.precision_plugin.forward_context():
            parts = [module.training_step(part.to(module.device)) * len(part) for part in self.held_out.split(64)]
        self.curve.append((trainer.global_step, float(torch.stack(parts).sum()) / len(self.held_out)))
        if self._since:
            self.losses.append((trainer.global_step, float(torch.stack(self._since).mean())))
            self._since = []


class Lab:
    """A study's texts and the weights that all its runs start from.

    Args:
        shape: Of the model, a key of ``STUDIES``.
        study: What is run.
        device: ``"cpu"`` or ``"cuda"``.
        folder: Where the pre-trained weights are kept; they are made if they are not there.
    """

    def __init__(self, shape: str, study: Study, device: str, folder: Path) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.shape, self.study, self.device = shape, study, device
        self.text, held_out = sources()
        self.held_out = windows(held_out, study.held_out, study.length)
        steps, size = study.pretraining
        self.start = self._pretrained(folder / f"{shape}-{steps}x{size}x{study.length}.pt")
        self.digest = _digest(self.start)

    def run(self, run: Run) -> dict[str, Any]:
        """Fine-tune in one way; the row says how the loss fell and what was trained and held meanwhile."""
        model = copy.deepcopy(self.start)
        total = sum(p.numel() for p in model.parameters())
        torch.manual_seed(run.seed)
        model, callbacks = equip(model, run.arm, run.seed)
        watch = Watch(self.held_out, self.study.every)
        self._train(
            model, run.lr, batches(self.text, *self.study.tuning, self.study.length, run.seed), watch, callbacks
        )
        return run.row() | {
            "held_out": watch.curve, "train": watch.losses, "bytes": watch.bytes,
            "trainable": watch.trainable, "parameters": total,
        }  # fmt: skip

    def _pretrained(self, path: Path) -> nn.Module:
        model = build(self.shape, self.study.length)
        if not path.exists():
            text = batches(topics(), *self.study.pretraining, self.study.length, seed=0)
            self._train(model, 1e-3, text, Watch(self.held_out, self.study.pretraining[0]), [])
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path)
            model = build(self.shape, self.study.length)  # without what training left behind
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    def _train(self, model: nn.Module, lr: float, text: Tensor, watch: Watch, callbacks: list[Callback]) -> None:
        trainer = Trainer(
            accelerator="gpu" if self.device == "cuda" else self.device,
            devices=1,
            precision=PRECISIONS[self.device],
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[*callbacks, watch],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Learner(model, lr, len(text)), torch.utils.data.DataLoader(text, batch_size=None))


def equip(model: nn.Module, arm: Arm, seed: int) -> tuple[nn.Module, list[Callback]]:
    """What an arm trains, and the callbacks it needs."""
    if arm.method == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=arm.rank, lora_alpha=2 * arm.rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config), []
    if arm.method == "lisa":
        sampling: dict[str, Any] = {"sampler": arm.sampler, "state_policy": arm.policy}
        return model, [LISA(arm.layers, arm.interval, **sampling, seed=seed)]
    return model, []


def _digest(model: nn.Module) -> str:
    """Stands for the weights of a model."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]
