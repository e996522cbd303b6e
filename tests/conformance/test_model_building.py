"""Where a model may come from, and what callbacks may do to it before and during training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.conformance.support import (
    Net,
    Regressor,
    assert_close,
    assert_equal,
    by_default,
    load,
    rank,
    trainer,
    values,
)
from tests.distributed.pool import Pool

SOME = by_default("nnn", "iig", of=["nnn", "iig", "ggg"])


class _Late(Regressor):
    """Builds its net in configure_model."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        super().__init__()
        del self.net
        self.net: Any = None
        self.seed = seed
        self.where = device

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(self.seed + 1000 * rank())
        with torch.device(self.where):
            self.net = Net()


def _fit_late(strategy: str, root: str, **arguments: Any) -> dict[str, Any]:
    module = _Late(**arguments)
    run = trainer(strategy, root, precision="64-true")
    run.fit(module)
    run.validate(module, verbose=False)
    run.save_checkpoint(f"{root}/late-{strategy}.ckpt")
    return values(module)


@pytest.mark.parametrize("partition", SOME)
def test_a_model_may_be_built_in_configure_model(pool: Pool, tmp_path: Path, partition: str) -> None:
    torch.manual_seed(0)
    expected = _fit_late("one", str(tmp_path))
    for weights in pool.run(_fit_late, partition, str(tmp_path)):
        assert_close(weights, expected)
    assert_close(load(tmp_path / f"late-{partition}.ckpt"), load(tmp_path / "late-one.ckpt"))


def _start_on_meta(partition: str, root: str) -> dict[str, Any]:
    """The initial values that a model built on meta is given."""
    seen: dict[str, Any] = {}

    class Starting(_Late):
        def on_train_start(self) -> None:
            with self.trainer.strategy.full_parameters():
                seen.update(values(self.net))

    trainer(partition, root, max_steps=1).fit(Starting(device="meta"))
    return seen


@pytest.mark.parametrize("partition", SOME)
def test_a_model_built_on_meta_is_initialised_once_and_the_same_everywhere(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    results = pool.run(_start_on_meta, partition, str(tmp_path))
    plain = Net()
    for result in results:
        assert_equal(result, results[0])
        assert list(result) == list(values(plain))
        for name, parameter in plain.named_parameters():
            drawn = torch.from_numpy(result[name])
            if name.endswith("norm.weight"):
                assert drawn.eq(1).all(), name
            elif name.endswith("norm.bias"):
                assert drawn.eq(0).all(), name
            else:  # uniform within a bound given by the fan-in, as in Linear.reset_parameters
                fan_in = plain.get_submodule(name.rpartition(".")[0]).in_features
                assert 0 < drawn.abs().max() <= fan_in**-0.5, name
                assert drawn.unique().numel() == parameter.numel(), name


class _Without(nn.Module):
    """Has a parameter and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(3))


def _uninitialisable(root: str) -> str:
    class Bad(_Late):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(5, 3), _Without())

    try:
        trainer("iig", root).fit(Bad())
    except (TypeError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_a_meta_module_that_cannot_initialise_itself_is_named_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(_uninitialisable, str(tmp_path)):
        assert "_Without was built on the meta device but has no reset_parameters()" in message


def _gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


MODELS = {"gpt2": _gpt2, "llama": _llama}


class _Language(Regressor):
    """A tiny language model from transformers; on meta it takes the values of a checkpoint."""

    def __init__(self, name: str, how: str) -> None:
        LightningModule.__init__(self)
        self.name, self.how = name, how
        self.model: Any = None
        if how == "init":
            self.build("cpu")

    def build(self, device: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1000 * rank())
            with torch.device(device):
                self.model = MODELS[self.name]()

    def configure_model(self) -> None:
        if self.model is None:
            self.build("meta" if self.how == "meta" else "cpu")

    def loss(self, batch: Any) -> Tensor:
        tokens = (batch[0].abs() * 100).long() % 32
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)


def _fit_language(strategy: str, root: str, name: str, how: str, resume: str | None = None) -> dict[str, Any]:
    module = _Language(name, how)
    run = trainer(strategy, root, max_epochs=1 if resume is None else 2)
    run.fit(module, ckpt_path=resume)
    if resume is None:
        run.save_checkpoint(f"{root}/{name}-{strategy}.ckpt")
    return values(module)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("partition", ["iig"])
def test_transformers_models_train_from_init_configure_model_and_meta(
    pool: Pool, tmp_path: Path, partition: str, name: str
) -> None:
    root = str(tmp_path)
    expected = _fit_language("one", root, name, "init")
    for how in ("init", "configure_model"):
        for weights in pool.run(_fit_language, partition, root, name, how):
            assert_close(weights, expected, tolerance=1e-4)
    resume = f"{root}/{name}-one.ckpt"
    expected = _fit_language("one", root, name, "init", resume)
    for weights in pool.run(_fit_language, partition, root, name, "meta", resume):
        assert_close(weights, expected, tolerance=1e-4)


def _meta_language(partition: str, root: str, name: str) -> tuple[float, float]:
    """First and last loss of a language model that starts on meta without a checkpoint."""
    losses = []

    class Noting(_Language):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(self.all_gather(loss.detach()).mean().item())
            return loss

    trainer(partition, root, max_epochs=3).fit(Noting(name, "meta"))
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", by_default("llama", of=list(MODELS)))
def test_transformers_models_built_on_meta_start_like_any_and_learn(pool: Pool, tmp_path: Path, name: str) -> None:
    for first, last in pool.run(_meta_language, "ggg", str(tmp_path), name):
        assert abs(first - math.log(32)) < 0.2  # small random weights: a uniform guess
        assert last < first - 0.05


class _Unfreeze(BaseFinetuning):
    """Trains the outlet for an epoch, then the blocks as well, with a learning rate of their own."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net.inlet)
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=5e-3)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net.inlet, optimizer, initial_denom_lr=2.0)


class _Finetuned(Regressor):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _finetune(strategy: str, root: str, epochs: int = 3, resume: str | None = None) -> dict[str, Any]:
    module = _Finetuned().double()
    run = trainer(strategy, root, precision="64-true", max_epochs=epochs, callbacks=[_Unfreeze()])
    run.fit(module, ckpt_path=resume)
    run.save_checkpoint(f"{root}/{strategy}-{epochs}.ckpt")
    return values(module)


@pytest.mark.parametrize("partition", by_default("iig", of=["nnn", "iig", "ggg"]))  # ggg is resumed, below
def test_finetuning_that_unfreezes_layers_and_adds_param_groups_equals_one_process(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    expected = _finetune("one", str(tmp_path))
    for weights in pool.run(_finetune, partition, str(tmp_path)):
        assert_close(weights, expected)
    ours, theirs = load(tmp_path / f"{partition}-3.ckpt"), load(tmp_path / "one-3.ckpt")
    assert len(theirs["optimizer_states"][0]["param_groups"]) == 3
    assert_close(ours, theirs)


def test_finetuning_resumed_with_its_param_groups_equals_one_process(pool: Pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    for strategy in ("one", "ggg"):  # saved after the blocks have got a group of their own
        _finetune("one", root, 2) if strategy == "one" else pool.run(_finetune, strategy, root, 2)
        assert len(load(tmp_path / f"{strategy}-2.ckpt")["optimizer_states"][0]["param_groups"]) == 2
    expected = _finetune("one", root, 4, f"{root}/one-2.ckpt")
    for saved in ("one", "ggg"):
        for weights in pool.run(_finetune, "iig", root, 4, f"{root}/{saved}-2.ckpt"):
            assert_close(weights, expected)
