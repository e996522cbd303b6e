"""The command line: what LightningCLI makes of the strategy's arguments, and one run through the console script."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_paro import ParoStrategy, Partition
from lightning_paro.cli.main import main
from tests.interpreter import Python

ROOT = Path(__file__).parents[2]
YAML = ROOT / "examples" / "byte_gpt.yaml"
LINEAR_AND_GELU = (torch.nn.Linear, torch.nn.GELU)
SCRIPT = Path(sys.executable).with_name("lightning-paro")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["lightning-paro"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # whatever the CLI sets is undone


def parse(*args: str, **kwargs: Any) -> LightningCLI:
    """The CLI of the console script, instantiated and not run."""
    kwargs = kwargs or {"subclass_mode_model": True, "subclass_mode_data": True}
    return LightningCLI(run=False, args=list(args), seed_everything_default=0, **kwargs)


def strategy_with(value: str, argument: str) -> ParoStrategy:
    """The strategy for ``{argument: value}`` in a yaml of a user's own LightningCLI."""
    config = {"class_path": "lightning_paro.ParoStrategy", "init_args": {argument: yaml.safe_load(value)}}
    args = {"trainer": {"strategy": config, "accelerator": "cpu", "devices": 4, "logger": False}}
    cli = LightningCLI(BoringModel, BoringDataModule, run=False, args=args, seed_everything_default=0)
    assert isinstance(cli.trainer.strategy, ParoStrategy)
    return cli.trainer.strategy


def test_the_example_yaml_builds_model_data_and_strategy() -> None:
    cli = parse("--config", str(YAML))
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ParoStrategy)
    assert (str(strategy.partition), strategy.group_size) == ("iig", 2)
    assert type(cli.model).__module__ == "examples.byte_gpt"
    assert cli.model.hparams.context == cli.datamodule.hparams.context
    assert cli.trainer.accumulate_grad_batches == 2


def test_a_strategy_name_needs_no_import_of_the_users() -> None:
    strategy = parse("--config", str(YAML), "--trainer.strategy", "paro_nig").trainer.strategy
    assert isinstance(strategy, ParoStrategy)
    assert strategy.partition == Partition.parse("nig")


def test_an_argument_of_the_yaml_can_be_changed_on_the_command_line() -> None:
    strategy = parse("--config", str(YAML), "--trainer.strategy.init_args.group_size", "4").trainer.strategy
    assert (str(strategy.partition), strategy.group_size) == ("iig", 4)


def test_a_refused_name_says_the_rule_and_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"os >= max\(p, g\).*nearest valid names are .*paro_gig"):
        parse("--config", str(YAML), "--trainer.strategy", "paro_gii")


@pytest.mark.parametrize("partition", ["nnn", "IGG", "paro_ggg"])
def test_a_users_own_cli_reads_the_partition(partition: str) -> None:
    assert strategy_with(partition, "partition").partition == Partition.parse(partition)


@pytest.mark.parametrize(
    ("argument", "value", "attribute", "expected"),
    [
        ("group_size", "2", "group_size", 2),
        ("group_size", "null", "group_size", None),
        ("units", "auto", "_units", "auto"),
        ("units", "[torch.nn.TransformerEncoderLayer]", "_units", [torch.nn.TransformerEncoderLayer]),
        ("grad_dtype", "bfloat16", "_grad_dtype", "bfloat16"),
        ("reduce_dtype", "float32", "_reduce_dtype", "float32"),
        ("nonfinite", "skip", "_nonfinite", "skip"),
        ("timeout", "'0:10:00'", "_timeout", timedelta(minutes=10)),
        ("timeout", "null", "_timeout", None),
        ("start_method", "spawn", "_start_method", "spawn"),
        ("activation_checkpointing", "[torch.nn.Linear, torch.nn.GELU]", "_checkpointed", LINEAR_AND_GELU),
        ("activation_checkpointing", "torch.nn.Linear", "_checkpointed", LINEAR_AND_GELU[:1]),
        ("process_group_backend", "gloo", "_process_group_backend", "gloo"),
    ],
)
def test_every_argument_can_be_written_in_yaml(argument: str, value: str, attribute: str, expected: Any) -> None:
    assert getattr(strategy_with(value, argument), attribute) == expected


@pytest.mark.parametrize(
    ("argument", "value"),
    [("units", "blocks"), ("nonfinite", "ignore"), ("start_method", "thread"), ("timeout", "soon"), ("grupsize", "2")],
)
def test_a_value_that_does_not_fit_names_the_argument(
    argument: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        strategy_with(value, argument)
    assert argument in capsys.readouterr().err


def printed_by_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    monkeypatch.setattr(sys, "argv", ["lightning-paro", *args])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_the_subcommands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by_main(monkeypatch, capsys, "--help")
    assert all(verb in printed for verb in ("fit", "validate", "test", "predict", "plan", "probe"))


def test_the_printed_configuration_is_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = printed_by_main(monkeypatch, capsys, "fit", "-c", str(YAML), "--print_config")
    strategy = yaml.safe_load(printed)["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_paro.ParoStrategy"
    assert strategy["init_args"]["units"] == "auto"
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    again = printed_by_main(monkeypatch, capsys, "fit", "-c", str(path), "--print_config")
    assert yaml.safe_load(again) == yaml.safe_load(printed)


@pytest.mark.timeout(150)
def test_the_console_script_trains_the_example_on_two_ranks(tmp_path: Path) -> None:
    small = ["--model.init_args.layers", "2", "--model.init_args.width", "32", "--data.init_args.held_out_samples", "8"]
    trainer = ["--trainer.devices", "2", "--trainer.fast_dev_run", "2", "--trainer.default_root_dir", tmp_path]
    process = Python([SCRIPT, "fit", "-c", YAML, *small, *trainer], tmp_path / "log")
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()
        output = (tmp_path / "log").read_text()
        print(output)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in output
    assert "`Trainer.fit` stopped: `max_epochs=1` reached" in output
