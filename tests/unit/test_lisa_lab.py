"""The lab of benchmarks/lisa.py: what is walked, what the formula and arithmetic say, and runs that are cut off."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.lab import lisa_time
from benchmarks.lab.lisa_arms import ARMS, TIMED, arms_of, formula, subject
from benchmarks.lab.lisa_memory import KINDS, Recorder, held, measure, periods
from benchmarks.lab.lisa_process import MEASURES, attempt
from benchmarks.lab.lisa_results import memory_bars, speeds, told_bars
from benchmarks.lab.lisa_runs import Job, Results, Room, run, setup_of
from benchmarks.lab.lisa_training import ends
from benchmarks.lab.page import pictures, render
from benchmarks.lab.pictures import digest
from benchmarks.lisa import memory_jobs, time_jobs

GIB = 2**30
CPU = torch.device("cpu")

# Of the model "tiny": six layers of width 32, two of four heads for keys and values, 64 inside, 64 tokens.
ENDS, NORM, LAYER = 2 * 64 * 32, 32, 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32
TOTAL, TENSORS = ENDS + NORM + 6 * LAYER, 9


# ---- what the formula says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "total", "layer", "gigabytes"),
    [  # 8 P; 2 P + 6 A; 2 P + 8 R, in bytes of 10^9
        ("llama-2-7b", 6_738_415_616, 202_383_360, {"full": 53.9, "lisa_eh": 15.0, "lisa_2": 17.5, "lora_128": 16.0}),
        ("tinyllama", 1_100_048_384, 44_044_288, {"full": 8.8, "lisa_eh": 3.0, "lisa_2": 3.5, "lora_128": 3.0}),
        ("gpt2-small", 124_439_808, 7_087_872, {"full": 1.0, "lisa_eh": 0.5, "lisa_2": 0.6, "lora_128": 0.4}),
    ],
)
def test_public_shapes_have_their_numbers_of_parameters(
    shape: str, total: int, layer: int, gigabytes: dict[str, float]
) -> None:
    for arm, expected in gigabytes.items():
        made = subject(shape, "sdpa", ARMS[arm], torch.device("meta"))
        assert made.counts.total == total
        assert set(made.counts.layers) == {layer}
        assert made.layers[0] in set(made.model.modules())
        assert round(formula(ARMS[arm], made, seen=0) / 1e9, 1) == expected, arm


def test_adapters_are_on_all_linear_layers_but_the_head() -> None:
    made = subject("tiny", "sdpa", ARMS["lora_256"], CPU)
    ends = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)
    assert made.adapters == 6 * 256 * ends
    trained = [p for p in made.model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == made.adapters
    assert {p.dtype for p in trained} == {torch.bfloat16}


def test_a_tied_head_has_no_arm_without_it() -> None:
    assert arms_of("llama-2-7b") == list(ARMS)
    assert [arm for arm in ARMS if arm not in arms_of("gpt2-small")] == ["lisa_e"]


def test_state_that_is_kept_is_that_of_every_layer_seen() -> None:
    made = subject("tiny", "sdpa", ARMS["lisa_2_keep"], CPU)
    least = 2 * TOTAL + 6 * (ENDS + NORM + 2 * LAYER)
    assert formula(ARMS["lisa_2"], made, seen=6) == formula(ARMS["lisa_2_keep"], made, seen=2) == least
    assert formula(ARMS["lisa_2_keep"], made, seen=6) == least + 4 * 4 * LAYER


# ---- what is measured ----------------------------------------------------------------------------------------


def expected_states(layers: int, head: bool = True) -> int:
    """Bytes of two moments in bf16, and of a float32 counter for each tensor."""
    numel = ENDS // (1 if head else 2) + NORM + layers * LAYER
    return 4 * numel + 4 * (2 + head + layers * TENSORS)


@pytest.mark.parametrize(
    ("arm", "layers", "active", "head"),
    [("full", 6, 6, True), ("lisa_e", 0, 0, False), ("lisa_4", 4, 4, True), ("lisa_2", 2, 2, True),
     ("lisa_2_keep", 6, 2, True)],
)  # fmt: skip
def test_what_an_arm_holds_is_what_it_trains(arm: str, layers: int, active: int, head: bool) -> None:
    row = measure(CPU, "tiny", "eager", arm)
    assert row["weights_bytes"] == 2 * TOTAL
    assert row["gradients_bytes"] == 2 * (ENDS // (1 if head else 2) + NORM + active * LAYER)
    assert row["states_bytes"] == expected_states(layers, head)
    assert 0 < row["error"] < 0.001, "counters are not in the formula"
    assert row["loss"] < row["first_loss"] < 4.5
    assert row["periods"] == (6 if arm.startswith("lisa_2") else 4)
    if arm != "full":
        assert [len(period) for period in row["active"]] == [active] * row["periods"]
        assert len({tuple(period) for period in row["active"]}) > 1 or not active
    if arm == "lisa_2_keep":
        seen = [len({i for period in row["active"][: n + 1] for i in period}) for n in range(row["periods"])]
        assert row["states_by_period"] == [expected_states(number) for number in seen]
        assert row["layers_seen"] == seen[-1] == 6, "the oracle above took it that all layers had their turn"
    else:
        assert row["states_by_period"] == [expected_states(layers, head)] * row["periods"]


def test_adapters_are_held_and_nothing_of_the_model_beside_its_weights() -> None:
    row = measure(CPU, "tiny-gpt2", "sdpa", "lora_128")
    adapters = row["trained"]
    assert row["weights_bytes"] == 2 * row["parameters"]
    assert row["gradients_bytes"] == 2 * adapters
    assert row["states_bytes"] == 4 * adapters + 4 * 6 * 4 * 2
    assert row["loss"] < row["first_loss"]


def test_memory_is_counted_once_and_a_stale_gradient_is_seen() -> None:
    tensor = torch.zeros(100, dtype=torch.bfloat16)
    assert held([tensor, tensor[:10], tensor.view(10, 10), None, torch.zeros(1)]) == 204
    module = nn.Linear(4, 2, bias=False)
    module.requires_grad_(False).weight.grad = torch.zeros(2, 4)
    module.device = CPU
    optimizer = torch.optim.AdamW(module.parameters())
    recorder = Recorder([module])
    trainer: Any = type("Trainer", (), {"optimizers": [optimizer]})
    recorder.on_before_optimizer_step(trainer, module, optimizer)
    recorder.on_train_batch_end(trainer, module, {"loss": torch.zeros(())}, None, 0)
    assert recorder.sizes == [{"weights": 32, "gradients": 32, "states": 0}]
    assert recorder.active == [[]]


def test_a_loss_that_is_not_finite_is_no_measurement() -> None:
    assert ends([torch.tensor(2.0), torch.tensor(3.0)]) == {"first_loss": 2.0, "loss": 3.0}
    with pytest.raises(ValueError, match=r"the loss went from 2.0 to 1.0; expected finite"):
        ends([torch.tensor(2.0), torch.tensor(float("nan")), torch.tensor(1.0)])


def test_long_arms_could_train_every_layer_twice() -> None:
    assert periods(ARMS["lisa_2"], 32) == periods(ARMS["lisa_2_keep"], 32) == 32
    assert periods(ARMS["lisa_2"], 3) == periods(ARMS["full"], 32) == 4, "three switches at least"


@pytest.mark.gpu
def test_a_gpu_says_what_its_peak_is() -> None:
    row = measure(torch.device("cuda"), "tiny", "sdpa", "lisa_2")
    walked = sum(row[f"{kind}_bytes"] for kind in KINDS)
    assert walked <= row["between_bytes"] <= row["peak_bytes"] <= row["reserved_bytes"]
    assert row["activations_bytes"] == row["peak_bytes"] - walked


def test_times_are_those_of_parts_and_of_whole_steps() -> None:
    row = lisa_time.measure(CPU, "tiny", 2, "lisa_2")
    assert row["parameters"] == TOTAL
    assert row["trained"] == ENDS + NORM + 2 * LAYER
    assert row["matrices"] == ENDS // 2 + 6 * LAYER
    assert row["trained_matrices"] == ENDS // 2 + 2 * LAYER
    assert all(row[f"{part}_s"] > 0 for part in (*lisa_time.PARTS, "step", "switch"))
    assert row["loss"] < row["first_loss"]


def test_a_step_is_told_apart_into_its_parts() -> None:
    seconds = []
    for number in range(25):
        between = 100.0 if number % 10 == 0 else 0.5
        seconds += [between, *((1000.0,) * 3 if number < 5 else (1.0, 2.0, 3.0))]
    found = lisa_time.medians(seconds[1:])
    assert found == {"forward_s": 1.0, "backward_s": 2.0, "update_s": 3.0, "step_s": 6.5, "switch_s": 106.0}


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::embedding_dense_backward", "gradient of the embedding"),
        ("aten::_log_softmax_backward_data", "cross entropy"),
        ("aten::nll_loss_forward", "cross entropy"),
        ("aten::_scaled_dot_product_flash_attention_backward", "attention"),
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::mul", "rest"),
        ("aten::mean", "rest"),
    ],
)
def test_operators_are_told_apart_by_name(name: str, what: str) -> None:
    assert lisa_time.operation(name) == what


# ---- what follows --------------------------------------------------------------------------------------------


def memory_row(arm: str, attention: str = "sdpa", peak: float | None = 20.0, error: float = 0.001) -> dict[str, Any]:
    return {
        "measure": "memory", "shape": "llama-2-7b", "attention": attention, "arm": arm, "status": "ok",
        "parameters": 6_738_000_000, "trained": 667_000_000, "layers": 32, "layers_seen": 28, "interval": 2,
        "periods": 2,
        "weights_bytes": 12 * GIB, "gradients_bytes": GIB, "states_bytes": 2 * GIB, "formula_bytes": 15 * GIB,
        "error": error, "peak_bytes": peak and int(peak * GIB), "reserved_bytes": peak and int(peak * GIB) + GIB,
        "activations_bytes": peak and int(peak * GIB) - 15 * GIB,
        "states_by_period": [GIB, (1 + 9 * (arm == "lisa_2_keep")) * GIB],
    }  # fmt: skip


def test_bars_are_missed_by_a_wrong_formula_and_by_too_much_memory() -> None:
    rows = [memory_row("lisa_2", error=-0.03), memory_row("lora_128", peak=25.0)]
    rows += [memory_row("lisa_2", "eager", peak=30.0), memory_row("lora_128", "eager", peak=29.0)]
    bars = {bar["text"]: (bar["value"], bar["reached"]) for bar in told_bars(memory_bars(rows))}
    assert bars == {
        "largest error of the formula, %": (3.0, False),
        "E+H+2 layers, sdpa, peak GiB": (20.0, True),
        "E+H+2 layers, eager, peak of LoRA r = 128": (pytest.approx(30 / 29, rel=1e-6), False),
        "E+H+2 layers, sdpa, peak of LoRA r = 128": (0.8, True),
    }


def test_what_is_not_measured_reaches_no_bar() -> None:
    assert [bar.reached for bar in memory_bars([])] == [None]
    assert len(memory_bars([memory_row("lisa_2", peak=None)])) == 1
    assert [bar.reached for bar in memory_bars([memory_row("lisa_2", peak=23.5)])] == [True, False, None, None]
    failed = {"shape": "llama-2-7b", "attention": "sdpa", "arm": "lora_128", "status": "out of memory"}
    assert [bar.reached for bar in memory_bars([memory_row("lisa_2"), failed])] == [True, True, None, None]


def time_row(arm: str, forward: float, backward: float, update: float, step: float, batch: int = 1) -> dict[str, Any]:
    """Of a model with 1000 parameters, all in matrices."""
    trained, adapters = {"full": (1000, 0), "lisa_2": (100, 0), "lora_128": (50, 50)}[arm]
    return {
        "measure": "time", "shape": "llama-2-7b", "batch": batch, "arm": arm, "compiled": False, "status": "ok",
        "parameters": 1000, "adapters": adapters, "trained": trained, "matrices": 1000 + adapters,
        "trained_matrices": trained, "forward_s": forward, "backward_s": backward, "update_s": update, "step_s": step,
        "switch_s": 2 * step, "first_loss": 10.0, "loss": 9.0,
    }  # fmt: skip


def test_arithmetic_allows_three_passes_for_two_and_what_is_trained() -> None:
    rows = [time_row("lisa_2", 1.0, 1.5, 0.1, 2.8), time_row("full", 1.0, 2.0, 1.0, 4.2)]
    rows += [time_row("lora_128", 1.2, 1.8, 0.1, 3.3), time_row("lisa_2", 1.0, 1.0, 1.0, 3.0, batch=8)]
    lisa, full, lora = speeds(rows)
    assert (full.passes, full.passes_bound, full.step, full.step_bound) == (1, 1, 1, 1)
    assert lisa.passes == pytest.approx(3 / 2.5)
    assert lisa.passes_bound == pytest.approx(3 / 2.1)
    assert lora.passes_bound == pytest.approx(3000 / (2 * 1050 + 50))
    assert lisa.step == pytest.approx(4.2 / 2.8)
    assert lisa.step_bound == pytest.approx(4.2 / (3 * 2.1 / 3 + 0.1 + 0.2)), "0.2 s are between steps"


# ---- runs ----------------------------------------------------------------------------------------------------


def test_largest_arms_get_room_and_times_are_alone() -> None:
    jobs = list(memory_jobs(["llama-2-7b", "gpt2-small"], ["eager", "sdpa"], list(ARMS)))
    assert len(jobs) == 2 * (len(ARMS) + len(ARMS) - 1)
    assert all(len(job.runs) == 1 for job in jobs), "a fresh process each"
    assert jobs[0].gib > 59 > jobs[-1].gib > 0
    timed = list(time_jobs(["tiny"], [1, 8], compiled=True))
    assert [run["arm"] for run in timed[0].runs] == list(TIMED)
    names = [(job.runs[0]["measure"], job.runs[0].get("compiled")) for job in timed]
    assert names == [("time", False)] * 2 + [("time", True)] * 2 + [("profile", None)] * 2


def test_room_is_not_given_twice() -> None:
    room, lock = Room(10.0), threading.Lock()
    taken, most = [0.0], [0.0]

    def use(gib: float) -> None:
        with room.of(gib):
            with lock:
                taken[0] += min(gib, 10.0)
                most[0] = max(most[0], taken[0])
            time.sleep(0.01)
            with lock:
                taken[0] -= min(gib, 10.0)

    threads = [threading.Thread(target=use, args=(gib,)) for gib in (6.0, 6.0, 4.0, 80.0, 3.0, 6.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads), "what is larger than the whole gets the whole"
    assert most[0] == 10.0


def test_what_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(device: torch.device, **_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("tried to allocate")

    assert attempt(CPU, "memory", shape="none", attention="sdpa", arm="full") == {"status": "KeyError: 'none'"}
    monkeypatch.setitem(MEASURES, "time", too_large)
    assert attempt(CPU, "time", shape="tiny", batch=8, arm="full") == {"status": "out of memory"}


@pytest.mark.full
def test_rows_of_processes_arrive_and_those_that_failed_are_run_again(tmp_path: Path) -> None:
    good, bad = ({"measure": "memory", "shape": "tiny", "attention": "sdpa", "arm": arm} for arm in ("lisa_eh", "none"))
    deadly = {"measure": "memory", "device": "given twice"}
    out = tmp_path / "rows.json"

    def results() -> Results:
        return Results(out, setup_of("cpu"), lambda rows: {"number": len(rows)})

    run([Job((good, bad, deadly))], results(), "cpu")
    report = json.loads(out.read_text())
    assert report["setup"]["device"].startswith("CPU")
    assert [row["status"].split(":")[0] for row in report["rows"]] == ["ok", "KeyError", "the process ended with 1"]
    assert report["rows"][0]["states_bytes"] == expected_states(0)
    assert report["number"] == 3
    assert results().missing([good, bad, deadly]) == [bad, deadly]
    run([Job((good,))], results(), "cpu")
    assert json.loads(out.read_text()) == report, "nothing was left to do"


def test_a_row_takes_the_place_of_one_that_failed_and_another_setup_is_refused(tmp_path: Path) -> None:
    out, first, other = tmp_path / "rows.json", {"arm": "full", "batch": 1}, {"arm": "full", "batch": 8}
    results = Results(out, {"device": "Made Up 1"}, lambda rows: {})
    for row in (first | {"status": "out of memory"}, other | {"status": "ok"}, first | {"status": "ok", "loss": 1.0}):
        results.add({key: row[key] for key in first}, row)
    rows = Results(out, {"device": "Made Up 1"}, lambda rows: {}).report["rows"]
    assert rows == [other | {"status": "ok"}, first | {"status": "ok", "loss": 1.0}]
    with pytest.raises(SystemExit, match=r"device Made Up 1 there, Made Up 2 here. HINT: give another --out"):
        Results(out, {"device": "Made Up 2"}, lambda rows: {})


# ---- the page ------------------------------------------------------------------------------------------------

SETUP = {"device": "Made Up 1", "versions": {"torch": "9.8"}, "hosts": 1, "ranks_per_host": 1, "gpus": 1}


def reports() -> dict[str, Any]:
    rows = [memory_row(arm) for arm in ("lisa_2_keep", "lisa_2", "full")] + [memory_row("full", "eager")]
    run = ("measure", "shape", "attention", "arm")
    rows += [{key: memory_row("lora_512")[key] for key in run} | {"status": "out of memory"}]
    times = [time_row("lisa_2", 1.0, 1.5, 0.1, 2.8), time_row("full", 1.0, 2.0, 1.0, 4.2)]
    shape = {"shape": "llama-2-7b"}
    profile = shape | {"measure": "profile", "batch": 1, "arm": "full", "status": "ok"}
    spent = dict.fromkeys([*lisa_time.OPERATIONS, "rest"], 0.25)
    left_out = {"measure": "time", "batch": 8, "arm": "full", "compiled": True, "status": "out of memory"}
    unseen = profile | {"arm": "lisa_2", "operations_s": None}
    return {
        "lisa_memory": {"setup": SETUP, "rows": rows, "bars": told_bars(memory_bars(rows))},
        "lisa_time": {"setup": SETUP, "rows": [*times, profile | {"operations_s": spent}, unseen, shape | left_out]},
    }


def part(name: str) -> str:
    return render(f"<!-- generated: {name} -->\n<!-- end -->\n", reports())


def test_the_page_says_what_is_held_and_how_state_grows() -> None:
    text = part("lisa_memory")
    assert "\nMade Up 1; torch 9.8.\n" in text
    assert "#### llama-2-7b, 6,738 million parameters, eager attention\n" in text
    row = "| LISA, E+H+2 layers | 667 M | 12.00 | 1.00 | 2.00 | 15.00 | +0.10% | 5.00 | **20.00** | 21.00 |"
    assert text.index("| full |") < text.index(row) < text.index("| 2 layers, state kept |")
    assert "In 2 periods of 2 steps 28 of 32 layers were trained.\n" in text
    assert "Optimizer state that is kept grew from 1.00 to 10.00 GiB; else it is 1.00 GiB at most.\n" in text
    assert "| E+H+2 layers, sdpa, peak GiB | ≤ 23.0 | 20.000 | reached by 13 % |" in text
    assert "peak of LoRA" not in text, "it was not measured"
    assert "* Not measured: LoRA, r = 512: out of memory.\n" in text


def test_the_page_sets_times_beside_arithmetic() -> None:
    text = part("lisa_time")
    assert "| 1 | full | 1000.0 | 2000.0 | 1000.0 | 4200.0 | 8400.0 | 1.00 | 1.00 | 1.00 | 1.00 |" in text
    assert "| 1 | LISA, E+H+2 layers | 1000.0 | 1500.0 | 100.0 | 2800.0 | 5600.0 | 1.20 | 1.43 | 1.50 | 1.75 |" in text
    assert "| ms a step, on the device | full, batch 1 |\n" in text
    assert "| optimizer | 250.0 |" in text
    assert "* Not measured: full, batch 8, compiled: out of memory.\n" in text


def test_pictures_are_small_and_say_what_they_were_drawn_from(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = pictures(reports())
    assert sorted(drawn) == ["lisa-memory.png", "lisa-time.png"]
    for name, (draw, data) in drawn.items():
        draw(data, tmp_path / name)
        picture = (tmp_path / name).read_bytes()
        assert len(picture) < 100_000
        assert digest(data).encode() in picture
