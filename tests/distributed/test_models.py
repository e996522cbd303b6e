"""Models and tools of others: transformers, peft, torch.compile, DDP's treatment of BatchNorm."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_paro.sharding import _units
from tests.distributed.comparing import Values, differences, values_of
from tests.distributed.loops import TOLERANCE, Alone, Block, Sharded, Stack, accumulate, adamw, assert_as_alone, share
from tests.distributed.pool import Pool


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 19, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False)).double()


def _train_on_tokens(loop: Alone, model: nn.Module, micro_batches: int = 1) -> nn.Module:
    model.train()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            with loop.step():

                def loss(rank: int, seed: int = 10 * step + micro) -> Tensor:
                    generator = torch.Generator().manual_seed(100 * seed + rank)
                    tokens = torch.randint(0, 19, (2, 6), generator=generator)
                    return model(input_ids=tokens, labels=tokens).loss / micro_batches

                mean = loop.mean(loss)
            loop.backward(mean, sync=micro == micro_batches - 1)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


def _transformers(loop: Alone) -> nn.Module:
    return _train_on_tokens(loop, _gpt2(), micro_batches=2)


def _transformers_checkpointed(loop: Alone) -> nn.Module:
    model = _gpt2()
    model.gradient_checkpointing_enable()
    return _train_on_tokens(loop, model)


def _transformers_checkpointed_with_reentry(loop: Alone) -> nn.Module:
    model = _gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return _train_on_tokens(loop, model)


def _lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(_gpt2(), config).double()


def _peft(loop: Alone) -> nn.Module:
    return _train_on_tokens(loop, _lora(), micro_batches=2)


def _peft_checkpointed(loop: Alone) -> nn.Module:
    model = _lora()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return _train_on_tokens(loop, model)


def _encoder_decoder(loop: Alone) -> nn.Module:
    """What the encoder puts out goes into every block of the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 19, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return _train_on_tokens(loop, T5ForConditionalGeneration(config).double())


@pytest.mark.parametrize(
    "scenario",
    [
        _transformers,
        _transformers_checkpointed,
        _transformers_checkpointed_with_reentry,
        _peft,
        _peft_checkpointed,
        _encoder_decoder,
    ],
)
def test_models_of_transformers_and_peft_equal_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


class Quantised(nn.Module):
    """A trained layer on top of frozen values in a dtype that neither gloo nor NCCL takes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.layer = nn.Linear(6, 6, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.zeros(6, 6, dtype=dtype), requires_grad=False)
        self.register_buffer("levels", torch.zeros(6, dtype=dtype))

    def fill(self, by: int) -> None:
        """With values that rank 0 alone has."""
        self.frozen.data = (by * torch.arange(36.0).view(6, 6)).to(self.dtype)
        self.levels = (by * torch.arange(6.0)).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) @ self.frozen.double() / 36 + self.levels.double()


def _quantised(loop: Alone) -> nn.Module:
    model = nn.Sequential(*(Quantised(dtype) for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16)))
    for module in model:
        module.fill(by=1 if loop.rank == 0 else 0)
    loop.shard(model)
    optimizer = loop.attach(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01))
    accumulate(loop, model, optimizer, steps=2, micro_batches=1)
    return model


def test_frozen_values_that_no_backend_takes_travel_as_bytes(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _quantised, few)


def _train_compiled(loop: Alone, before: bool) -> nn.Module:
    torch._dynamo.reset()
    model = Stack(Block(), Block()).double()
    if not before:
        loop.shard(model)
    if isinstance(loop, Sharded):  # the oracle stays eager
        torch._dynamo.utils.counters.clear()
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if before:
        loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
    if isinstance(loop, Sharded):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "blocks must share one graph"
        assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    return model


def _compiled_before_sharding(loop: Alone) -> nn.Module:
    return _train_compiled(loop, before=True)


def _compiled_after_sharding(loop: Alone) -> nn.Module:
    return _train_compiled(loop, before=False)


def _compiled_anew(loop: Alone) -> nn.Module:
    """Gradients are cleared after the forward, as Lightning does, so a compiler sees those of the step before."""
    torch._dynamo.reset()
    model = loop.shard(Stack(Block(), Block()).double())
    if isinstance(loop, Sharded):
        for block in model.blocks:
            block.compile(backend="aot_eager")
    optimizer = loop.attach(adamw(model))
    for step, rows in enumerate((3, 3, 2)):
        with loop.step():
            mean = loop.mean(lambda rank, s=step, n=rows: model(share(s, rank)[:n]).square().mean())
        optimizer.zero_grad()
        loop.backward(mean)
        optimizer.step()
    torch._dynamo.reset()
    return model


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(_compiled_before_sharding, marks=pytest.mark.full),
        _compiled_after_sharding,
        pytest.param(_compiled_anew, marks=pytest.mark.full),
    ],
)
def test_compiled_blocks_equal_one_process(pool: Pool, few: tuple[str, ...], scenario: Any) -> None:
    assert_as_alone(pool, scenario, few)


class Large(nn.Module):
    """An embedding and a head of their own, beside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _large_embedding_and_head(loop: Alone) -> nn.Module:
    threshold, _units.LARGE_BYTES = _units.LARGE_BYTES, 100
    try:
        model = Large().double()
        loop.shard(model)
    finally:
        _units.LARGE_BYTES = threshold
    if isinstance(loop, Sharded):
        assert [unit.name for unit in loop.engine.units] == ["embedding", "blocks.0", "blocks.1", "head"]
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():

            def loss(rank: int, step: int = step) -> Tensor:
                tokens = torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
                return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

            mean = loop.mean(loss)
        loop.backward(mean)
        optimizer.step()
    return model


def test_a_large_embedding_and_head_are_units_of_their_own(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _large_embedding_and_head, few)


class Nested(Block):
    """A unit around units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x * self.gate)
        return self.inner[1](self.inner[0](x) * self.gate)


def _nested_units(loop: Alone) -> nn.Module:
    model = Stack(Nested(), Nested()).double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
        with loop.evaluation(whole=False), torch.no_grad():  # one rank is inside a unit when another asks for it
            for rank in loop.ranks():
                for block in (model.blocks[0], model.blocks[0].inner[rank % 2], model.blocks[rank % 2])[rank % 3 :]:
                    assert torch.isfinite(block(torch.ones(2, 8, dtype=torch.float64))).all()
    return model


def test_units_inside_units_equal_one_process(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _nested_units, few, units=(Block,))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _normalised_by_ddp(accumulation: int) -> Values:
    model = Normalised().double()
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model)
    rank = torch.distributed.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulation):
            with nullcontext() if micro == accumulation - 1 else wrapped.no_sync():
                wrapped(share(step, rank, micro)).sum(1).square().mean().backward()
        optimizer.step()
    return values_of(model)


def _normalised(loop: Alone, accumulation: int) -> nn.Module:
    model = loop.shard(Normalised().double())
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulation):
            with loop.step():
                mean = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).sum(1).square().mean())
            loop.backward(mean, sync=micro == accumulation - 1)
        optimizer.step()
    return model


def _differing_from_ddp(partitions: tuple[str, ...], accumulation: int) -> list[str]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    expected = _normalised_by_ddp(accumulation)
    found = []
    for partition in partitions:
        torch.manual_seed(rank)
        loop = Sharded(partition)
        model = _normalised(loop, accumulation)
        loop.close()
        values = values_of(model)
        if rank:  # between two synchronisations other ranks have statistics of their own, which nobody keeps
            values, expected = ({k: v for k, v in d.items() if "running" not in k} for d in (values, expected))
        found += [f"{partition}: {text}" for text in differences(values, expected, TOLERANCE)]
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
def test_batch_norm_equals_ddp(pool: Pool, few: tuple[str, ...], accumulation: int) -> None:
    for wrong in pool.run(_differing_from_ddp, few, accumulation):
        assert not wrong, "\n".join(wrong)
