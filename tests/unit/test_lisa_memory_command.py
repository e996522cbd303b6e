"""``lightning-paro lisa-memory``, as it is typed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, T5Config

from lightning_paro.cli.main import main

WIDTH, INNER, VOCAB, LAYERS = 32, 48, 64, 4
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
WHOLE = 2 * VOCAB * WIDTH + WIDTH + LAYERS * LAYER


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config.save_pretrained(tmp_path / "llama")

    def call(arguments: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["lightning-paro", "lisa-memory", *f"{arguments} --json out/it.json".split()])
        main()
        return json.loads((tmp_path / "out" / "it.json").read_text())

    return call


def totals(report: dict) -> dict[str, int]:
    return {row["arm"]: row["total_bytes"] for row in report["rows"]}


@pytest.mark.parametrize("path", ["llama", "llama/config.json"])
def test_what_a_config_takes(run, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(f"--config {path} --layers 2,4")
    ends = 4 * 2 * WIDTH + 3 * (WIDTH + INNER)
    always = 2 * VOCAB * WIDTH + WIDTH
    assert totals(found) == {
        "full": 8 * WHOLE,
        "LISA E": 2 * WHOLE + 6 * (always - VOCAB * WIDTH),
        "LISA E+H": 2 * WHOLE + 6 * always,
        "LISA E+H+2L": 2 * WHOLE + 6 * (always + 2 * LAYER),
        "LISA E+H+4L": 2 * WHOLE + 6 * WHOLE,
        "LoRA r128": 2 * WHOLE + 8 * 128 * ends * LAYERS,
    }
    assert found["parameters"] == {
        "total": WHOLE,
        "embeddings": VOCAB * WIDTH,
        "head": VOCAB * WIDTH,
        "rest": WIDTH,
        "layers": [LAYER] * LAYERS,
        "tied": False,
    }
    printed = " ".join(capsys.readouterr().out.split())
    assert "│ LISA E+H+2L │" in printed
    assert "Activations come on top" in printed
    assert f"With 4L LISA trains {WHOLE:,} parameters at a time; {always / WHOLE:.0%} of them" in printed


def test_layers_rank_and_precision_can_be_chosen(run, tmp_path: Path) -> None:
    found = run("--config llama --layers [3,1] --rank 7 --precision 32-true --csv out/it.csv")
    assert list(totals(found)) == ["full", "LISA E", "LISA E+H", "LISA E+H+1L", "LISA E+H+3L", "LoRA r7"]
    assert totals(found)["full"] == 16 * WHOLE
    assert found["bytes_per_parameter"] == {"weights": 4, "gradients": 4, "state": 8}
    with (tmp_path / "out" / "it.csv").open(newline="") as file:
        written = {row["arm"]: int(row["total_bytes"]) for row in csv.DictReader(file)}
    assert written == totals(found)


def test_layers_can_be_named_by_path(run, tmp_path: Path) -> None:
    T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2).save_pretrained(tmp_path / "t5")
    either = run("--config t5 --path encoder.block")["parameters"]
    both = run("--config t5 --path encoder.block,decoder.block")["parameters"]
    assert (len(either["layers"]), len(both["layers"])) == (3, 6)
    assert both["layers"][:3] == either["layers"]
    assert both == run("--config t5")["parameters"]


def test_embeddings_of_a_large_vocabulary_dominate(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GPT2Config(vocab_size=50257, n_embd=32, n_layer=4, n_head=2).save_pretrained(tmp_path / "gpt2")
    run("--config gpt2")
    printed = " ".join(capsys.readouterr().out.split())
    assert "98% of them are embeddings and head, which are one tensor, and what else is outside" in printed
    assert "so their number matters less than whether embeddings and head are trained." in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config llama --layers 2;3", "layers='2;3' is not understood: expected numbers of layers, such as 2,4"),
        ("--config llama --layers 2,5", "layers=5 is not understood: expected 0 to 4, the number of layers"),
        ("--config llama --layers -1", "layers=-1 is not understood: expected 0 to 4"),
        ("--config llama --path transformer.h", "path='transformer.h' is not there; expected the path of one ModuleL"),
        ("--config llama --rank 0", "rank=0 is not understood: expected at least 1"),
        ("--config nowhere/config.json", "config='nowhere/config.json': there is no such file. HINT: a folder"),
        ("--config /no/where", "config='/no/where': there is no such folder. HINT: give one that holds config.json"),
        ("--config bad", "config='bad': no model can be built from this config"),
    ],
)
def test_a_wrong_argument_is_one_line(run, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text(json.dumps(GPT2Config().to_dict() | {"n_layer": "two"}))
    with pytest.raises(SystemExit) as error:
        run(arguments)
    assert str(error.value).startswith("lightning-paro lisa-memory: ")
    assert message in str(error.value)
    assert "num_layers=" not in str(error.value)


@pytest.mark.parametrize(("arguments", "named"), [("", "config"), ("--config llama --precision fp8", "precision")])
def test_an_option_that_is_missing_or_none_of_several_is_named(
    run, arguments: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(arguments)
    assert named in capsys.readouterr().err.split("error:")[1]
