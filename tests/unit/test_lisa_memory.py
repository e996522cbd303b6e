"""LISA's memory: a table whose numbers are computed here from configs, and what tensors really take."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig

from lightning_paro import Partition, Topology
from lightning_paro.algorithms.anatomy import dissect
from lightning_paro.algorithms.lisa_memory import (
    ParameterCounts,
    adapter_parameters,
    arms,
    bytes_per_parameter,
    fitting_layers,
    lisa_state,
    parse_bytes,
)
from lightning_paro.callbacks._lisa_report import memory_report
from lightning_paro.planner import Network, StateBytes, Workload, cost

PURE = bytes_per_parameter("bf16-true")
MASTERED = bytes_per_parameter("bf16-mixed", paro=True, grad_dtype="bfloat16")
COUNTS = ParameterCounts(total=1000, embeddings=100, head=50, rest=10, layers=(200, 240, 180, 200))


def llama(vocab: int, width: int, inner: int, layers: int, heads: int, kv: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
    )


CONFIGS = {
    "GPT2-small": GPT2Config(),
    "TinyLlama": llama(32000, 2048, 5632, 22, 32, 4),
    "Mistral-7B": llama(32000, 4096, 14336, 32, 32, 8),  # the same layers as Llama's
    "LLaMA-2-7B": llama(32000, 4096, 11008, 32, 32, 32),
    "Llama-3.1-8B": llama(128256, 4096, 14336, 32, 32, 8),
}

# GB. Of 2 + 2 + 4 bytes: FT, E+H, 2 layers, 4 layers, LoRA of rank 128. 2 + 2 + 12: FT, 2 layers, LoRA
TABLE = {
    "GPT2-small": ((1.0, 0.5, 0.6, 0.7, 0.4), (2.0, 1.0, 0.6)),
    "TinyLlama": ((8.8, 3.0, 3.5, 4.0, 3.0), (17.6, 5.3, 3.8)),
    "Mistral-7B": ((57.9, 16.1, 18.7, 21.3, 17.2), (116, 24.3, 19.9)),
    "LLaMA-2-7B": ((53.9, 15.0, 17.5, 19.9, 16.0), (108, 22.8, 18.6)),
    "Llama-3.1-8B": ((64.2, 22.4, 25.0, 27.6, 18.7), (128, 36.9, 21.4)),
}


def sizes_of(config: Any) -> tuple[int, int, int, int, int, int]:
    """Embeddings, head, last norm, a layer, number of layers, and inputs and outputs of a layer's linear modules."""
    if isinstance(config, GPT2Config):
        d = config.n_embd
        layer = (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d) + 4 * d
        return (config.vocab_size + config.n_positions) * d, 0, 2 * d, layer, config.n_layer, 16 * d
    d, inner = config.hidden_size, config.intermediate_size
    kv = d // config.num_attention_heads * config.num_key_value_heads
    layer = 2 * d * d + 2 * d * kv + 3 * d * inner + 2 * d
    ends = 2 * (d + d) + 2 * (d + kv) + 3 * (d + inner)
    return config.vocab_size * d, config.vocab_size * d, d, layer, config.num_hidden_layers, ends


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_formula(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings, head, norm, layer, number, ends = sizes_of(config)
    whole = embeddings + head + norm + number * layer
    anatomy = dissect(model)
    counts = ParameterCounts.of(anatomy)
    assert counts == ParameterCounts(whole, embeddings, head, norm, (layer,) * number, tied=head == 0)
    adapters = adapter_parameters(model, anatomy.layers, 128)
    assert adapters == 128 * ends * number

    always = embeddings + head + norm
    for sizes, o, gammas, column in ((PURE, 4, (0, 2, 4), 0), (MASTERED, 12, (2,), 1)):
        found = arms(counts, gammas, sizes, adapters={128: adapters})
        rows = {row.arm: row.total for row in found}
        assert len(rows) == len(found)
        expected = [(4 + o) * whole]
        expected += [2 * whole + (2 + o) * (always + gamma * layer) for gamma in gammas]
        expected += [2 * whole + (4 + o) * adapters]
        names = ["full", *(f"LISA E+H+{gamma}L" if gamma else "LISA E+H" for gamma in gammas), "LoRA r128"]
        assert [rows[name] for name in names] == expected
        for written, size in zip(TABLE[name][column], expected, strict=True):
            assert written == pytest.approx(size / 1e9, abs=0.5 if written > 100 else 0.0501)
        if head:
            assert rows["LISA E"] == 2 * whole + (2 + o) * (embeddings + norm)
        else:  # nothing can be trained without the other
            assert "LISA E" not in rows


def test_adapters_are_those_that_peft_puts_on_all_linear_modules() -> None:
    config = llama(64, 32, 48, 3, 4, 2)
    model = AutoModelForCausalLM.from_config(config)
    predicted = adapter_parameters(model, dissect(model).layers, 5)
    before = memory_report(model, rank=5)
    adapted = get_peft_model(model, LoraConfig(r=5, target_modules="all-linear"))
    assert predicted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)

    report = memory_report(adapted, 1)  # LISA over adapters: everything has weights, adapters have the rest
    assert [row.arm for row in report.rows] == ["all adapters", "LISA 0L", "LISA 1L"]
    (lora,) = (row for row in before.rows if row.arm == "LoRA r5")
    assert (report.rows[0].weights, report.rows[0].total) == (lora.weights, lora.total)
    assert report.rows[2].total == lora.weights + 6 * predicted // 3


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=0 is not understood: expected at least 1. HINT"):
        adapter_parameters(nn.Linear(2, 2), [""], 0)


def test_a_tied_head_with_a_bias_of_its_own_has_no_row_without_it() -> None:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8)
    with torch.device("meta"):
        report = memory_report(AutoModelForCausalLM.from_config(config), 1)
    assert (report.counts.head, report.counts.tied) == (50, True)
    assert [row.arm for row in report.rows] == ["full", "LISA E+H", "LISA E+H+1L", "LoRA r128"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"precision": "bf16-true"}, (2, 2, 4)),
        ({"precision": "bf16-mixed"}, (4, 4, 8)),
        ({"precision": "16-mixed"}, (4, 4, 8)),
        ({"precision": "32-true"}, (4, 4, 8)),
        ({"precision": "64-true"}, (8, 8, 16)),
        ({"precision": "bf16-true", "paro": True}, (2, 2, 4)),
        ({"precision": "bf16-mixed", "paro": True}, (2, 4, 12)),
        ({"precision": "bf16-mixed", "paro": True, "grad_dtype": "bfloat16"}, (2, 2, 12)),
        ({"precision": "16-mixed", "paro": True}, (2, 4, 12)),
        ({"precision": "32-true", "paro": True}, (4, 4, 8)),
    ],
)
def test_bytes_of_a_precision(asked: dict[str, Any], expected: tuple[int, int, int]) -> None:
    sizes = bytes_per_parameter(**asked)
    assert (sizes.parameters, sizes.gradients, sizes.optimizer) == expected


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='8-mixed' is not known: expected one of bf16-mixed, "):
        bytes_per_parameter("8-mixed")


def test_the_peak_is_that_of_the_largest_layers() -> None:
    assert [COUNTS.active(number) for number in range(5)] == [160, 400, 600, 800, 980]
    assert COUNTS.active(1, head=False) == 350
    assert COUNTS.active(1, embeddings=False) == 300
    state = lisa_state(COUNTS, 2, bytes_per_parameter("32-true"))
    assert (state.arm, state.weights, state.gradients, state.state) == ("LISA E+H+2L", 4000, 2400, 4800)
    assert lisa_state(COUNTS, 2, PURE, embeddings=False).arm == "LISA H+2L"
    assert lisa_state(replace(COUNTS, tied=True, head=0), 1, PURE, embeddings=False).arm == "LISA 1L"


@pytest.mark.parametrize("number", [-1, 5])
def test_a_number_of_layers_that_are_not_there_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_layers={number} is not understood: expected 0 to 4, the number of"):
        COUNTS.active(number)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("partition", Partition.valid(), ids=str)
def test_shards_are_those_of_the_strategy(partition: Partition, precision: str) -> None:
    topology = Topology(world_size=8, group_size=2)
    counts = ParameterCounts(8 * 500, 8 * 50, 8 * 50, 8 * 10, (8 * 100,) * 3)
    sizes = bytes_per_parameter(precision, paro=True)
    rungs = (topology.divisor(rung) for rung in (partition.p, partition.g, partition.os))
    row = lisa_state(counts, 2, sizes, divisors=tuple(rungs))
    workload = Workload(counts.total, 8 * 310, sizes=StateBytes.of(precision))
    assert row.total == cost(partition, workload, Network(topology, 1e9, 1e9)).state_bytes


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("overhead", [0, 77])
def test_the_most_layers_that_fit(number: int, overhead: int) -> None:
    needed = 2 * 1000 + 6 * (160 + sum(sorted(COUNTS.layers)[-number:])) + overhead
    assert fitting_layers(needed, COUNTS, PURE, overhead_bytes=overhead) == number
    if number > 1:
        assert fitting_layers(needed - 1, COUNTS, PURE, overhead_bytes=overhead) == number - 1
    assert fitting_layers(10**9, COUNTS, PURE, overhead_bytes=overhead) == 4


def test_what_is_never_trained_and_shards_make_room() -> None:
    budget = 2 * 1000 + 6 * (160 + 240)
    assert fitting_layers(budget, COUNTS, PURE, embeddings=False, head=False) == 1
    assert fitting_layers(budget + 300, COUNTS, PURE, embeddings=False, head=False) == 2
    assert fitting_layers(budget, COUNTS, PURE, divisors=(2, 2, 2)) == 4


def test_a_memory_in_which_no_layer_fits_is_refused_with_the_numbers() -> None:
    counts = replace(COUNTS, total=2**31, embeddings=2**30, head=0, rest=0, layers=(2**29, 2**29))
    message = r"a memory of 13.90 GiB is not enough: one layer at a time takes 14.00 GiB, and none 11.00 GiB, of which "
    with pytest.raises(ValueError, match=message + r"1.00 GiB are not model state. HINT: freeze embeddings or head"):
        fitting_layers(int(13.9 * 2**30), counts, PURE, overhead_bytes=2**30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20GiB", 20 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("4KiB", 4096),
        ("20GB", 20 * 10**9),
        ("2.5MB", 2_500_000),
        ("3kB", 3000),
        ("17B", 17),
        ("8e9", 8 * 10**9),
        (12345, 12345),
        (8e9, 8 * 10**9),
    ],
)
def test_an_amount_of_memory(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "20Gib", "20 G", "-1GB", "0", "0.5B", "1e999", math.nan, math.inf, True])
def test_what_is_no_amount_of_memory_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"is not an amount of memory: expected .* HINT: for example '20GiB'"):
        parse_bytes(text)


def test_what_is_measured_is_what_was_predicted() -> None:
    model = AutoModelForCausalLM.from_config(llama(64, 32, 48, 4, 4, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.model.layers[:3].requires_grad_(False)  # as LISA leaves it
    report = memory_report(model, [1, 2], rank=4, optimizer=optimizer)
    assert [row.arm for row in report.rows][2:5] == ["LISA E+H", "LISA E+H+1L", "LISA E+H+2L"]
    assert (report.rows[-1].gradients, report.rows[-1].state) == (0, 0)

    tokens = torch.randint(64, (1, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    report = memory_report(model, 1, optimizer=optimizer)
    assert len(report.counts.layers) == 4
    assert [layer.input_layernorm.weight.requires_grad for layer in model.model.layers] == [False, False, False, True]
    predicted, measured = (next(row for row in report.rows if row.arm == arm) for arm in ("LISA E+H+1L", "measured"))
    assert (measured.weights, measured.gradients) == (predicted.weights, predicted.gradients)
    steps = 4 * len(optimizer.state)  # each entry has a float32 number of its steps
    assert measured.state == predicted.state + steps
    assert not measured.predicted


def test_a_tied_head_and_a_view_are_measured_once() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    tied = model.lm_head.weight.numel()
    halves = nn.Parameter(torch.zeros(10))
    model.first, model.second = nn.Parameter(halves.data[:5]), nn.Parameter(halves.data[5:])
    optimizer = torch.optim.SGD(model.parameters())
    report = memory_report(model, 1, precision="32-true", optimizer=optimizer)
    everything = sum(parameter.numel() for parameter in model.state_dict().values()) - tied
    assert report.rows[-1].weights == report.rows[0].weights == 4 * everything
    assert report.counts.tied


def test_a_report_is_read_as_text_and_as_values() -> None:
    model = AutoModelForCausalLM.from_config(llama(1000, 32, 48, 4, 4, 2))
    report = memory_report(model, rank=4)
    rows = json.loads(json.dumps(report.to_dict()))["rows"]
    assert [row["arm"] for row in rows] == ["full", "LISA E", "LISA E+H", "LISA E+H+2L", "LoRA r4"]
    for row in rows:
        assert row["total_bytes"] == row["weights_bytes"] + row["gradients_bytes"] + row["state_bytes"]
    assert rows[0]["total_bytes"] == 8 * sum(parameter.numel() for parameter in model.parameters())
    text = " ".join(str(report).split())
    assert f"│ full │ {rows[0]['weights_bytes'] / 2**10:.2f} │" in text
    assert "weights, KiB" in text
    assert "LlamaForCausalLM, " in text
    always, layer = 2 * 32000 + 32, 2 * 1024 + 2 * 512 + 3 * 32 * 48 + 64
    assert f"{always / (always + 2 * layer):.0%} of them are embeddings and head and what else is outside" in text
    assert "Activations come on top" in text
    assert "their number matters less than whether embeddings and head are trained" in text
