"""``lightning-paro plan``, as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from transformers import GPT2Config, GPT2LMHeadModel, T5Config

from lightning_paro.cli.main import main

SCALED = "--group 8 --inter 80 --intra 2000 --accumulate 10 --memory 80"
CLUSTER = f"--world 32 {SCALED}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)

    def call(arguments: str) -> dict | list:
        monkeypatch.setattr(sys, "argv", ["lightning-paro", "plan", *f"{arguments} --json out/plan.json".split()])
        main()
        return json.loads((tmp_path / "out" / "plan.json").read_text())

    return call


class Lit(LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.head = torch.nn.Linear(width, 1).requires_grad_(False)


def test_the_case_of_the_paper(run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = run(f"--params 7e9 --trainable 4.4e8 {CLUSTER} --activations 20 --nic gpu --csv plan.csv --plot plan.png")
    assert plan["recommended"] == plan["rows"][0]["partition"]
    assert plan["inputs"]["trainable"] == 4.4e8
    assert plan["inputs"]["inter_bytes_per_s"] == 10e9
    assert plan["inputs"]["activation_bytes"] == 20e9
    (iig,) = (row for row in plan["rows"] if row["partition"] == "iig")
    assert iig["memory_bytes"] == 2 * 7e9 / 8 + 4 * 4.4e8 / 8 + 12 * 4.4e8 / 32 + 20e9
    assert f"ParoStrategy('{plan['recommended']}', group_size=8)" in capsys.readouterr().out
    assert (tmp_path / "plan.csv").read_text().count("\n") == 15
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_says_what_would(run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--params 700e9 {CLUSTER}")["recommended"] is None
    assert "Nothing fits: the least is 350.00 GB" in " ".join(capsys.readouterr().out.split())


def test_many_sizes_of_a_cluster(run, tmp_path: Path) -> None:
    plans = run(f"--params 7e9 {SCALED} --scale 16:100 --plot scale.png")
    assert [plan["inputs"]["world_size"] for plan in plans] == [16, 32, 64]
    assert (tmp_path / "scale.png").exists()


@pytest.mark.parametrize("path", ["model", "model/config.json"])
def test_parameters_of_a_hugging_face_config(run, tmp_path: Path, path: str) -> None:
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    config.save_pretrained(tmp_path / "model")
    inputs = run(f"--hf {path} {CLUSTER}")["inputs"]
    model = GPT2LMHeadModel(config)
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert (inputs["parameters"], inputs["largest_unit"], inputs["rest"]) == (whole, block, whole - 3 * block)


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration", "T5EncoderModel", None])
def test_a_config_that_is_no_causal_language_model(run, tmp_path: Path, kind: str | None) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    config.architectures = kind and [kind]
    config.save_pretrained(tmp_path / "model")
    inputs = run(f"--hf model {CLUSTER}")["inputs"]
    model = getattr(transformers, kind or "T5Model")(config)
    assert inputs["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["BertModel", "GPT2Tokenizer", "AutoConfig", "pipeline", "SomebodysModel", 3])
def test_an_architecture_that_is_none_of_the_family_is_passed_over(run, tmp_path: Path, kind: object) -> None:
    config = GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [kind]}))
    whole = sum(parameter.numel() for parameter in GPT2LMHeadModel(config).parameters())
    assert run(f"--hf config.json {CLUSTER}")["inputs"]["parameters"] == whole


def test_a_config_of_which_nothing_can_be_built_is_one_line(run, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=100).to_dict() | {"n_layer": "two"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        SystemExit, match="hf='config.json': no model can be built from this config.*HINT: give the numb"
    ):
        run(f"--hf config.json {CLUSTER}")


def test_parameters_of_a_lightning_module(run) -> None:
    inputs = run(f"--model {__name__}.Lit --model.width 8 {CLUSTER}")["inputs"]
    assert (inputs["parameters"], inputs["trainable"]) == (3 * 72 + 9, 3 * 72)
    assert (inputs["largest_unit"], inputs["rest"]) == (72, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (CLUSTER, "one of params, hf and model says how large the model is, got none of them"),
        (f"--params 7e9 --hf gpt2 {CLUSTER}", "got params and hf"),
        (f"--params 7e9 {CLUSTER} --group 7", "group_size=7 does not divide world_size=32: 32 = 4 * 7 + 4"),
        ("--params 7e9 --group 8 --inter 80 --intra 2000 --memory 80", "neither world nor scale"),
        (f"--params 7e9 {CLUSTER} --scale 16:64", "world=32 and scale='16:64' both say"),
        (
            "--params 7e9 --world 32 --group 8 --intra 2000 --memory 80",
            "in groups of 8 need the bandwidth inter",
        ),
        (
            "--params 7e9 --world 32 --group 8 --inter 80 --memory 80",
            "in groups of 8 need the bandwidth intra",
        ),
        (f"--params 7e9 {SCALED} --scale 16-64", "scale='16-64' is not understood: expected FROM:TO"),
        (f"--params 7e9 {SCALED} --scale 64:16", "expected 0 < FROM <= TO"),
        (f"--params 7e9 {CLUSTER} --inter 0", "inter=0 is not understood: expected Gbit/s, above 0"),
        (f"--params 7e9 {CLUSTER} --memory -80", "memory=-80 is not understood: expected GB of 10^9 bytes, above 0"),
        (f"--params 7e9 {CLUSTER} --precision 64-true --grad_dtype bfloat16", "does not fit precision '64-true'"),
        (f"--params 7e9 --trainable 8e9 {CLUSTER}", "8e+09 of 7e+09 parameters cannot be trained"),
        (f"--hf nowhere/config.json {CLUSTER}", "nowhere"),
        (f"--hf /no/where {CLUSTER}", "hf='/no/where': there is no such folder. HINT: give one that holds config.json"),
    ],
)
def test_a_wrong_argument_is_one_line(run, arguments: str, message: str) -> None:
    with pytest.raises(SystemExit) as error:
        run(arguments)
    assert str(error.value).startswith("lightning-paro plan: ")
    assert message in str(error.value)


@pytest.mark.parametrize(("group", "link"), [(8, "--intra 2000"), (1, "--inter 80")])
def test_a_link_that_is_not_there_need_not_be_given(run, group: int, link: str) -> None:
    asked = f"--params 1e9 --world 8 --group {group} --memory 80"
    one, both = (run(f"{asked} {given}")["rows"] for given in (link, "--inter 80 --intra 2000"))
    for key in ("memory_bytes", "comm_s", "step_s"):
        assert [row[key] for row in one] == [row[key] for row in both]
