"""Which parameters of a model are layers, embeddings, head and rest."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from transformers import BartConfig, BartModel, LlamaConfig, LlamaForCausalLM

from lightning_paro.algorithms.anatomy import Anatomy, dissect


def anatomy_of(model: nn.Module, layers: str | Sequence[str] = "auto") -> Anatomy:
    """The anatomy; checks that every trainable parameter is in exactly one place, under its own name."""
    found = dissect(model, layers)
    places = (*found.layers.values(), found.embeddings, found.head, found.rest)
    named = [entry for place in places for entry in place.items()]
    assert all(found.layers.values())
    assert all(model.get_parameter(name) is parameter for name, parameter in named)
    trainable = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(id(parameter) for _, parameter in named) == sorted(trainable)
    return found


def below(model: nn.Module, modules: str) -> set[str]:
    """Names of the parameters of some modules, or of the parameters themselves."""
    owners = modules.split()
    return {name for name, _ in model.named_parameters() if any(f"{name}.".startswith(f"{o}.") for o in owners)}


def numbered(model: str, count: int) -> list[str]:
    return [f"{model}.layers.{index}" for index in range(count)]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Other(Block):
    pass


class Tower(nn.Module):
    """A model of no library: a projection of features, embeddings of positions, layers, a norm and a head."""

    def __init__(self, layers: int = 3, width: int = 4) -> None:
        super().__init__()
        self.project = nn.Linear(2, width)
        self.positions = nn.Embedding(5, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 3), nn.ReLU(), nn.Linear(3, 1))


class Lit(LightningModule):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def llama(layers: int = 3, hidden_size: int = 16) -> LlamaForCausalLM:
    return LlamaForCausalLM(config(num_hidden_layers=layers, hidden_size=hidden_size))


def config(**own: int) -> LlamaConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "vocab_size": 40}
    return LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **{**sizes, **own})


def test_a_model_of_no_library() -> None:
    found = anatomy_of(Tower())
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2"]
    assert list(found.embeddings) == ["positions.weight"]
    assert set(found.head) == below(Tower(), "head")
    assert set(found.rest) == below(Tower(), "project norm")
    assert not found.tied


def test_a_head_tied_by_hand_counts_as_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 9))
    model[2].weight = model[0].weight
    found = anatomy_of(model)
    assert (list(found.embeddings), list(found.head), found.tied) == (["0.weight"], ["2.bias"], True)


def test_stacks_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Lit(embed=nn.Embedding(9, 8), body=nn.TransformerEncoder(layer, 3), out=nn.Linear(8, 9))
    found = anatomy_of(model)
    assert list(found.layers) == ["body.layers.0", "body.layers.1", "body.layers.2"]
    assert (list(found.embeddings), list(found.head)) == (["embed.weight"], ["out.weight", "out.bias"])
    assert len(anatomy_of(nn.Transformer(8, 2, 2, 3, 16, batch_first=True)).layers) == 5
    assert list(anatomy_of(nn.Sequential(Block(), Block())).layers) == ["0", "1"]


def test_pairs_of_a_layer_and_an_activation_must_be_named() -> None:
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"Sequential has no stack of layers: expected .* HINT: .* '' \(the model"):
        dissect(mlp)
    with pytest.raises(ValueError, match="one or several of net"):
        dissect(Lit(net=mlp))
    assert list(anatomy_of(mlp, "").layers) == ["0", "2", "4"]
    assert list(anatomy_of(Lit(net=mlp), "net").layers) == ["net.0", "net.2", "net.4"]
    with pytest.raises(ValueError, match="HINT: put the repeated layers into one"):
        dissect(nn.Linear(4, 4))


def test_lists_in_a_list_count_one_by_one_unless_the_outer_one_is_named() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(2))
    model.head = nn.Linear(4, 4)
    assert list(anatomy_of(model).layers) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert list(anatomy_of(model, "layers").layers) == ["layers.0", "layers.1"]
    assert set(anatomy_of(model, "layers").layers["layers.1"]) == below(model, "layers.1")


def test_stages_of_different_widths() -> None:
    stages = []
    for depth, width in ((2, 4), (3, 8), (2, 16)):
        stage = Other(width)
        stage.blocks, stage.reduce = nn.ModuleList(Block(width) for _ in range(depth)), nn.Linear(width, 2 * width)
        stages.append(stage)
    model = nn.ModuleDict({"stages": nn.ModuleList(stages), "classifier": nn.Linear(32, 2)})
    assert list(anatomy_of(model).layers) == ["stages.0", "stages.1", "stages.2"]
    found = anatomy_of(model, [f"stages.{i}.blocks" for i in range(3)])
    assert list(found.layers) == [f"stages.{i}.blocks.{j}" for i, depth in enumerate((2, 3, 2)) for j in range(depth)]
    assert set(found.head) == below(model, "classifier")
    assert below(model, "stages.0.reduce stages.2.reduce") <= set(found.rest)
    with pytest.raises(ValueError, match=r"layers='blocks' is that of stages\.N\.blocks; .* has stages, stages\.N\.bl"):
        dissect(model, "blocks")


def test_a_short_stack_beside_a_long_one() -> None:
    model = Lit(encoder=Tower(16), decoder=Tower(2), small=Tower(2, width=2))  # the decoder holds a tenth
    assert list(anatomy_of(model).layers) == [*numbered("encoder", 16), *numbered("decoder", 2)]
    first = Lit(decoder=Tower(1), encoder=Tower(16))
    assert list(anatomy_of(first).layers) == [*numbered("decoder", 1), *numbered("encoder", 16)]


def test_lists_of_the_same_name_in_a_list() -> None:
    outer = nn.ModuleDict({"layers": nn.ModuleList([Other(1), Other(1)])})
    for layer in outer.layers:
        layer.layers = nn.ModuleList([Block()])
    assert list(anatomy_of(outer).layers) == ["layers.0", "layers.1"]
    outer.layers[0].layers.append(Block())
    outer.layers[1] = Tower(2)
    assert list(anatomy_of(outer).layers) == [f"layers.{i}.layers.{j}" for i in range(2) for j in range(2)]


def test_layers_of_several_classes_are_as_many_as_the_config_says() -> None:
    model = Tower()
    model.layers[1] = Other()
    with pytest.raises(ValueError, match="one or several of head, layers"):
        dissect(model)
    assert len(anatomy_of(model, "layers").layers) == 3
    model.config = SimpleNamespace(num_hidden_layers=3)
    assert list(anatomy_of(Lit(model=model)).layers) == ["model.layers.0", "model.layers.1", "model.layers.2"]


# ---- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["model.model.layers", "model.layers", "layers", ["layers"]])
def test_a_path_may_leave_out_what_is_in_front(path: str | list[str]) -> None:
    assert list(anatomy_of(Lit(model=llama()), path).layers) == [f"model.model.layers.{i}" for i in range(3)]


def test_the_layers_of_several_paths_are_in_the_order_given_once_each() -> None:
    bart = BartModel(BartConfig(d_model=16, vocab_size=40, encoder_layers=3, decoder_layers=2))
    found = anatomy_of(Lit(model=bart), ["decoder.layers", "encoder.layers", "model.decoder.layers"])
    assert list(found.layers) == [*numbered("model.decoder", 2), *numbered("model.encoder", 3)]
    only = anatomy_of(bart, "decoder.layers")
    assert list(only.layers) == numbered("decoder", 2)
    assert below(bart, "encoder.layers") <= set(only.rest)


def test_an_exact_path_is_not_ambiguous() -> None:
    model = Lit(layers=nn.ModuleList([Block(), Block()]), critic=Tower())
    assert list(anatomy_of(model, "layers").layers) == ["layers.0", "layers.1"]
    assert list(anatomy_of(model, "critic.layers").layers) == numbered("critic", 3)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("h", "is not there"),
        ("model.layer", "is not there"),
        ("del.layers", "is not there"),
        ("model.layers.0", "is that of a Block"),
        ("norm", "is that of a LayerNorm"),
        ("scale", "is not there"),
        ("empty", "is that of a ModuleList; expected the path of one ModuleList or Sequential that is not empty"),
        ("layers", "is that of critic.layers, model.layers"),
        (["model.layers", "critic.norm"], "is that of a LayerNorm"),
    ],
)
def test_a_wrong_path_says_what_there_is(path: str | list[str], what: str) -> None:
    model = Lit(model=Tower(), critic=Tower(), empty=nn.ModuleList())
    model.scale = nn.Parameter(torch.ones(()))
    given = repr(path if isinstance(path, str) else path[-1])
    with pytest.raises(ValueError, match=f"^layers={given} {what}") as error:
        dissect(model, path)
    expected = "; expected the path of one ModuleList or Sequential that is not empty"
    assert f"{expected}. HINT: this model has critic.head, critic.layers, model.head, model.layers." in str(error.value)


# ---- what is frozen, and what is shared ---------------------------------------------------------------------


def test_frozen_parameters_and_layers_are_left_out() -> None:
    model = Tower()
    model.layers[1].requires_grad_(False)
    model.layers[2].a.requires_grad_(False)
    model.positions.requires_grad_(False)
    model.head[2].requires_grad_(False)
    found = anatomy_of(model)
    assert {layer: len(own) for layer, own in found.layers.items()} == {"layers.0": 4, "layers.2": 2}
    assert (list(found.embeddings), list(found.head)) == ([], ["head.0.weight", "head.0.bias"])
    model.layers.requires_grad_(False)
    for path in ("auto", "layers"):
        with pytest.raises(ValueError, match=r"all 3 layers of Tower, 'layers\.0' to 'layers\.2', are frozen.*HINT: u"):
            dissect(model, path)


def test_quantized_weights_are_left_out() -> None:
    model = Tower()
    for layer in model.layers:
        layer.a.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    assert [list(own) for own in anatomy_of(model).layers.values()] == [
        [f"layers.{i}.a.bias", f"layers.{i}.b.weight", f"layers.{i}.b.bias"] for i in range(3)
    ]


def test_layers_that_share_what_is_trained_are_refused() -> None:
    model = Tower()
    model.layers[2].b.weight = model.layers[0].a.weight
    with pytest.raises(ValueError, match=r"layers 'layers\.0' and 'layers\.2' share parameters.* HINT: train all"):
        dissect(model)
    model.layers[0].a.weight.requires_grad_(False)
    assert [len(own) for own in anatomy_of(model).layers.values()] == [3, 4, 3]
    again = Tower()
    again.layers = nn.ModuleList([Block()] * 3)
    with pytest.raises(ValueError, match=r"layers 'layers\.0' and 'layers\.1' share parameters"):
        dissect(again, "layers")


def test_what_a_layer_shares_with_the_outside_belongs_there() -> None:
    model = Tower()
    model.norm.weight = model.layers[0].b.bias
    for layer in model.layers:
        layer.positions = model.positions
    found = anatomy_of(model)
    assert [len(own) for own in found.layers.values()] == [3, 4, 4]
    assert "layers.0.b.bias" in found.rest
    assert list(found.embeddings) == ["positions.weight"]
    model.layers[2].requires_grad_(False)
    model.layers[2].b.bias = model.norm.bias
    assert list(anatomy_of(model).layers) == ["layers.0", "layers.1"]


# ---- several models side by side ----------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("student", "teacher"), ("teacher", "student")])
@pytest.mark.parametrize("wide", [16, 128])
def test_a_frozen_teacher_does_not_count(names: tuple[str, str], wide: int) -> None:
    models = {"student": llama(2), "teacher": llama(4, hidden_size=wide).requires_grad_(False)}
    found = anatomy_of(Lit(**{name: models[name] for name in names}))
    assert list(found.layers) == numbered("student.model", 2)
    assert (list(found.head), list(found.rest)) == (["student.lm_head.weight"], ["student.model.norm.weight"])


def test_beside_a_large_frozen_stack_of_no_library_the_layers_are_named() -> None:
    model = Lit(teacher=Tower(9, 20).requires_grad_(False), student=Tower(2))
    with pytest.raises(ValueError, match=r"all 9 layers .* are frozen.*, student\.layers, teacher"):
        dissect(model)
    found = anatomy_of(model, "student.layers")
    assert list(found.layers) == numbered("student", 2)
    assert set(found.head) == below(model, "student.head")


def test_a_critic_that_is_trained_counts_unless_the_path_of_one_is_given() -> None:
    model = Lit(actor=Tower(3), critic=Tower(2))
    assert list(anatomy_of(model).layers) == [*numbered("actor", 3), *numbered("critic", 2)]
    for path in ("actor.layers", "critic.layers"):
        found = anatomy_of(model, path)
        name, other = path.removesuffix(".layers"), {"actor.layers": "critic", "critic.layers": "actor"}[path]
        assert list(found.layers) == numbered(name, len(found.layers))
        assert below(model, f"{name}.head") <= set(found.head)
        assert below(model, f"{other}.layers {other}.norm") <= set(found.rest)


def test_what_comes_of_it_can_be_trained_apart() -> None:
    """Of a random model: freezing all layers but one leaves the gradients that the anatomy says."""
    model = llama()
    found = anatomy_of(model)
    for layer, own in found.layers.items():
        for parameter in own.values():
            parameter.requires_grad_(layer == "model.layers.1")
    model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    alive = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert alive == {*found.layers["model.layers.1"], *found.embeddings, *found.head, *found.rest}
