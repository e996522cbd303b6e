"""Which parameters live and lie together."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_paro.sharding import _units
from lightning_paro.sharding._units import UnitsArgument, find_units, repeated_blocks


def names(root: nn.Module, units: UnitsArgument = "auto") -> dict[str, list[str]]:
    """Unit names and their parameters'; checks that every parameter is in exactly one."""
    specs = find_units(root, units)
    found = [id(parameter) for spec in specs for _, parameter in spec.parameters]
    assert sorted(found) == sorted({id(p) for p in root.parameters()})
    for spec in specs:
        assert (spec.module is None) == (spec.name == "rest")
        assert spec.module is None or spec.module is root.get_submodule(spec.name)
        for name, parameter in spec.parameters:
            assert root.get_parameter(name) is parameter
    return {spec.name: [name for name, _ in spec.parameters] for spec in specs}


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(4, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(()))


def test_blocks_of_a_stack_are_units_and_what_is_outside_is_the_rest() -> None:
    assert names(Model()) == {
        "rest": ["scale", "embedding.weight", "head.weight"],
        **{f"blocks.{i}": [f"blocks.{i}.a.weight", f"blocks.{i}.b.weight"] for i in range(3)},
    }


def test_a_sequential_root_is_a_stack_itself() -> None:
    assert list(names(nn.Sequential(Block(), Block()))) == ["0", "1"]
    named = nn.Sequential(OrderedDict(encoder=Block(), decoder=Block()))
    assert list(names(named)) == ["encoder", "decoder"]


def test_a_model_without_repetition_is_one_unit() -> None:
    assert list(names(nn.Linear(3, 2))) == ["rest"]
    assert list(names(Model(blocks=1))) == ["rest"]
    assert list(names(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))) == ["rest"]
    assert names(nn.Tanh()) == {}


def test_a_stack_must_hold_a_fair_part_of_the_model() -> None:
    model = Model()
    model.tower = nn.Linear(40, 40)
    assert list(names(model)) == ["rest"]
    model.tower = nn.Linear(18, 18)  # the blocks hold 96 of 479 elements
    assert "blocks.0" in names(model)


def test_embeddings_do_not_count_when_stacks_are_weighed() -> None:
    class WithEmbeddings(Model):
        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    small, large = Model(), WithEmbeddings()
    for model in (small, large):
        model.embedding, model.head = nn.Embedding(500, 4), nn.Linear(4, 500)
    assert list(names(small)) == ["rest"]
    assert list(names(large)) == ["rest", "blocks.0", "blocks.1", "blocks.2"]


def test_of_nested_stacks_the_outermost_counts() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert list(names(model)) == ["stages.0", "stages.1"]


def test_stacks_side_by_side_are_all_found_in_module_order() -> None:
    model = nn.Module()
    model.decoder = nn.ModuleList(Block() for _ in range(2))
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    assert list(names(model)) == ["decoder.0", "decoder.1", "encoder.0", "encoder.1"]
    assert list(repeated_blocks(model)) == ["decoder.0", "decoder.1", "encoder.0", "encoder.1"]


def test_children_of_different_classes_are_no_stack() -> None:
    model = nn.Module()
    model.mixed = nn.ModuleList([Block(), nn.Linear(4, 4)])
    assert list(names(model)) == ["rest"]


def test_tied_parameters_belong_to_the_rest_under_their_first_name() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    model.blocks[2].b.weight = model.blocks[0].b.weight
    found = names(model)
    assert found["rest"] == ["scale", "embedding.weight", "blocks.0.b.weight"]
    assert found["blocks.0"] == ["blocks.0.a.weight"]
    assert found["blocks.2"] == ["blocks.2.a.weight"]


def test_a_parameter_used_twice_inside_one_unit_stays_there() -> None:
    model = Model()
    model.blocks[1].b.weight = model.blocks[1].a.weight
    assert names(model)["blocks.1"] == ["blocks.1.a.weight"]


def test_a_block_that_is_registered_elsewhere_as_well_is_shared_by_both_places() -> None:
    model = nn.Module()
    model.first = Block()
    model.blocks = nn.ModuleList([model.first, Block(), Block()])
    assert names(model) == {
        "rest": ["first.a.weight", "first.b.weight"],
        "blocks.1": ["blocks.1.a.weight", "blocks.1.b.weight"],
        "blocks.2": ["blocks.2.a.weight", "blocks.2.b.weight"],
    }


def test_large_embeddings_and_heads_are_units_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(_units, "LARGE_BYTES", 79)  # both have 20 elements, 80 bytes
    assert list(names(model)) == ["rest", "embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert names(model)["rest"] == ["scale"]
    monkeypatch.setattr(_units, "LARGE_BYTES", 80)
    assert list(names(model)) == ["rest", "blocks.0", "blocks.1", "blocks.2"]


def test_a_large_embedding_that_is_tied_belongs_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    monkeypatch.setattr(_units, "LARGE_BYTES", 79)
    assert names(model)["rest"] == ["scale", "embedding.weight"]


def test_large_layers_inside_blocks_stay_in_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_units, "LARGE_BYTES", 1)
    assert list(names(nn.Sequential(Block(), Block()))) == ["0", "1"]


def test_units_chosen_by_class() -> None:
    assert list(names(Model(), [nn.Embedding, Block])) == ["rest", "embedding", "blocks.0", "blocks.1", "blocks.2"]
    assert list(names(Model(), {nn.Linear}))[1:3] == ["blocks.0.a", "blocks.0.b"]


def test_units_chosen_by_a_callable_never_include_the_root() -> None:
    found = names(Model(), lambda module: isinstance(module, (Model, nn.ModuleList)))
    assert list(found) == ["rest", "blocks"]


def test_of_nested_units_the_innermost_holds_a_parameter() -> None:
    model = Model(blocks=2)
    model.blocks[0].gain = nn.Parameter(torch.ones(3))
    found = names(model, lambda module: isinstance(module, Block) or module is model.blocks[0].a)
    assert found["blocks.0"] == ["blocks.0.gain", "blocks.0.b.weight"]
    assert found["blocks.0.a"] == ["blocks.0.a.weight"]


def test_names_that_share_a_prefix_are_told_apart() -> None:
    model = nn.Module()
    model.block = Block()
    model.block1 = Block()
    found = names(model, [Block])
    assert found == {name: [f"{name}.a.weight", f"{name}.b.weight"] for name in ("block", "block1")}


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("blocks", r"units='blocks' is not understood: expected 'auto', a collection of module classes, or a callable"),
        ([], r"units=\[\] must name at least one subclass of torch\.nn\.Module and nothing else"),
        ([int], r"units=\[<class 'int'>\] must name at least one subclass of torch\.nn\.Module"),
        ([Block()], r"must name at least one subclass of torch\.nn\.Module"),
        ([nn.Conv2d], r"selects no module of Model\. HINT: print the model and name the class"),
        (lambda module: False, r"selects no module of Model\."),
    ],
)
def test_units_that_are_not_understood_or_select_nothing_are_refused(units: UnitsArgument, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_units(Model(), units)


def test_lists_in_a_list_stand_for_the_blocks_in_them() -> None:
    root = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(4, 4)]) for _ in range(3))
    assert [name for name in names(root) if name != "rest"] == [f"{i}.{j}" for i in range(3) for j in range(2)]


def test_tables_that_are_looked_up_through_their_weight_are_no_blocks() -> None:
    root = nn.Sequential(OrderedDict(codes=nn.ModuleList(nn.Embedding(50, 4) for _ in range(3)), head=nn.Linear(4, 5)))
    assert list(names(root)) == ["rest"]
