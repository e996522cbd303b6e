"""LISA's arguments: what is refused, and what a LightningCLI makes of a yaml."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_paro.algorithms.sampling import Draw
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import assert_close, fit, values
from tests.distributed.lisa import INTERVAL, Net, by_hand, table, train

ROOT = Path(__file__).parents[2]

WRONG = [
    ({"num_layers": True}, r"num_layers=True must be an integer, 0 or more"),
    ({"num_layers": -1}, r"num_layers=-1 must be an integer, 0 or more"),
    ({"num_layers": 2.0}, r"num_layers=2.0 must be an integer, 0 or more"),
    ({"interval": 0}, r"interval=0 must be an integer, 1 or more"),
    ({"interval": False}, r"interval=False must be an integer, 1 or more"),
    ({"interval": "20"}, r"interval='20' must be an integer, 1 or more"),
    ({"warmup": -1}, r"warmup=-1 must be an integer, 0 or more"),
    ({"warmup": True}, r"warmup=True must be an integer, 0 or more"),
    ({"seed": None}, r"seed=None must be an integer\."),
    ({"seed": True}, r"seed=True must be an integer\."),
    ({"sampler": "random"}, r"sampler='random' .* 'uniform', 'cyclic', 'weight_norm', 'grad_norm' or a callable"),
    ({"sampler": None}, r"sampler=None is not understood"),
    ({"state_policy": "drop"}, r"state_policy='drop' .* 'drop_frozen', 'reset_all', 'offload', 'keep'"),
    ({"state_policy": ["keep"]}, r"state_policy=\['keep'\] is not understood"),
    ({"train_embeddings": True}, r"train_embeddings=True .* 'always', 'sampled', 'never'"),
    ({"train_head": "once"}, r"train_head='once' .* 'always', 'sampled', 'never'"),
    ({"keep_master": "false"}, r"keep_master='false' is not understood: expected True or False"),
    ({"layers": None}, r"layers=None is not understood: expected 'auto', or the path .*HINT"),
    ({"layers": []}, r"layers=\[\] is not understood"),
    ({"layers": ["layers", 3]}, r"layers=\['layers', 3\] is not understood"),
    ({"layers": ["auto", "layers"]}, r"'auto' finds all layers by itself"),
    ({"memory_budget": "much"}, r"'much' is not an amount of memory.*HINT: for example '20GiB'"),
    ({"memory_budget": "20 gib"}, r"'20 gib' is not an amount of memory"),
    ({"memory_budget": 0}, r"'?0'? is not an amount of memory"),
    ({"memory_budget": True}, r"True is not an amount of memory"),
    ({"memory_budget": "-1GiB"}, r"'-1GiB' is not an amount of memory"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_what_is_not_understood_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LISA(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 6}, r"num_layers=6, but there are 5 layers to draw from: 'layers.0' to 'layers.4'.*HINT"),
        ({"num_layers": 8, "train_head": "sampled"}, r"but there are 6 layers to draw from: 'layers.0' to 'head'"),
        ({"layers": "model.layers"}, r"layers='model.layers' is not there.*HINT: this model has layers"),
        ({"layers": "embedding"}, r"layers='embedding' is that of a Embedding; expected the path of one ModuleList"),
        ({"layers": ["layers", "no"]}, r"layers='no' is not there"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused_before_the_first_step(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(**{"sampler": "uniform", **wrong})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0], r"returned \[0\] in period 0; expected 2 different numbers from 0 to 4"),
        ([1, 1], r"expected 2 different numbers"),
        ([0, 5], r"expected 2 different numbers"),
        (None, r"returned None in period 0"),
        ([0.0, 1.0], r"expected 2 different numbers"),
    ],
    ids=str,
)
def test_a_sampler_that_returns_something_else_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(sampler=lambda ask: returned)


class FrozenOutside(Net):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.embedding, self.norm, self.head):
            part.requires_grad_(False)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers=0, and nothing outside of the 5 layers is trained"):
        train(num_layers=0, sampler="uniform", build=FrozenOutside)


def test_no_layer_at_a_time_trains_what_is_outside_of_them() -> None:
    _, module, lisa = train(num_layers=0, sampler="uniform")
    torch.manual_seed(0)
    moved = {name for name, p in Net().double().named_parameters() if not torch.equal(p, module.get_parameter(name))}
    assert moved == {"embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert lisa.active_layers == []
    assert lisa.trainable == 11 * 6 + 2 * 6 + 6 * 11 + 11


def test_all_layers_at_a_time_is_full_fine_tuning() -> None:
    _, module, lisa = train(num_layers=5, sampler="uniform", interval=1)
    assert lisa.trainable == sum(p.numel() for p in module.parameters())
    assert {active for _, _, active in lisa.periods} == {(0, 1, 2, 3, 4)}


# ---- LightningCLI ---------------------------------------------------------------------------------------------------


def odd_layers(ask: Draw) -> Sequence[int]:
    """A sampler of the user's own, named in a yaml."""
    return [1, 3][: ask.num_layers]


def _from_yaml(arguments: str) -> LISA:
    config = {"class_path": "lightning_paro.callbacks.LISA", "init_args": yaml.safe_load(arguments) or {}}
    args = {"trainer": {"callbacks": [config], "accelerator": "cpu", "devices": 1, "logger": False}}
    cli = LightningCLI(BoringModel, BoringDataModule, run=False, args=args, seed_everything_default=0)
    (lisa,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, LISA))
    return lisa


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"num_layers": 2, "interval": 20, "layers": "auto", "memory_budget": None, "keep_master": False}),
        ("layers: model.layers", {"layers": "model.layers"}),
        ("layers: [encoder.block, decoder.block]", {"layers": ["encoder.block", "decoder.block"]}),
        ("memory_budget: 20GiB", {"memory_budget": "20GiB"}),
        ("memory_budget: 2000000", {"memory_budget": 2000000}),
        ("{keep_master: true, warmup: 3, seed: -1}", {"keep_master": True, "warmup": 3, "seed": -1}),
        ("sampler: grad_norm", {"sampler": "grad_norm"}),
        ("sampler: tests.conformance.test_lisa_arguments.odd_layers", {"sampler": odd_layers}),
        ("{state_policy: offload, train_embeddings: never}", {"state_policy": "offload", "train_embeddings": "never"}),
    ],
)
def test_a_yaml_makes_lisa(arguments: str, expected: dict[str, Any]) -> None:
    lisa = _from_yaml(arguments)
    assert {name: getattr(lisa, name) for name in expected} == expected


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    "arguments",
    [
        "num_layers: true",
        "num_layers: 2.5",
        "interval: 0",
        "state_policy: sometimes",
        "layers: 3",
        "sampler: random",
        "memory_budget: plenty",
        "no_such: 1",
    ],
)
def test_a_wrong_yaml_is_refused(arguments: str) -> None:
    with pytest.raises((SystemExit, ValueError)):
        _from_yaml(arguments)


@pytest.mark.usefixtures("_alone")
def test_the_example_yaml_is_lisa() -> None:
    cli = LightningCLI(
        run=False, args=["--config", "examples/lisa.yaml"], subclass_mode_model=True, subclass_mode_data=True
    )
    (lisa,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, LISA))
    assert (lisa.num_layers, lisa.interval, lisa.state_policy) == (2, 10, "drop_frozen")


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda lisa: pickle.loads(pickle.dumps(lisa))], ids=["copy", "pickle"]
)
def test_a_copy_trains_as_the_original(again: Any) -> None:
    made = again(LISA(num_layers=2, interval=INTERVAL, sampler=table, warmup=0, memory_budget=None))
    _, module = fit(made, count=20, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert_close(values(module), by_hand(10))
    assert len(made.periods) == 4
    assert again(made).periods == made.periods  # after training as well
