"""The anatomy of a model below torch.compile, below PEFT, and of one that has two names."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForSequenceClassification

from lightning_paro.algorithms.anatomy import dissect
from tests.unit.test_anatomy import Block, Lit, Other, Tower, anatomy_of, config, llama, numbered


@pytest.mark.parametrize("path", ["auto", "model.layers", "_orig_mod.model.layers"])
def test_below_a_compiled_model(path: str) -> None:
    found = anatomy_of(torch.compile(llama(), backend="eager"), path)
    assert list(found.layers) == numbered("_orig_mod.model", 3)
    assert (list(found.head), list(found.rest)) == (["_orig_mod.lm_head.weight"], ["_orig_mod.model.norm.weight"])


def test_a_path_through_a_compiled_module() -> None:
    model = Lit(encoder=torch.compile(Tower(), backend="eager"), decoder=torch.compile(Tower(), backend="eager"))
    assert list(anatomy_of(model, "encoder.layers").layers) == numbered("encoder._orig_mod", 3)
    with pytest.raises(ValueError, match="layers='layers' is that of decoder.layers, encoder.layers;"):
        dissect(model, "layers")
    assert list(anatomy_of(torch.compile(nn.Sequential(Block(), Other()), backend="eager"), "").layers) == [
        "_orig_mod.0",
        "_orig_mod.1",
    ]


@pytest.mark.parametrize("path", ["auto", "layers"])
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_that_are_compiled_each(path: str, in_place: bool) -> None:
    model = llama()
    for index, layer in enumerate(model.model.layers):
        if in_place:
            layer.compile(backend="eager")
        else:
            model.model.layers[index] = torch.compile(layer, backend="eager")
    found = anatomy_of(model, path)
    assert [layer.removesuffix("._orig_mod") for layer in found.layers] == numbered("model", 3)
    assert [len(own) for own in found.layers.values()] == [9, 9, 9]


@pytest.mark.parametrize("path", ["auto", "model.layers"])
def test_of_a_model_with_adapters_only_those(path: str) -> None:
    where = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head", "input_layernorm"])
    model = Lit(model=get_peft_model(llama(), where))
    found = anatomy_of(model, path)
    inner = "model.base_model.model"
    assert list(found.layers) == numbered(f"{inner}.model", 3)
    for layer, own in found.layers.items():
        places = (f"{layer}.self_attn.q_proj", f"{layer}.mlp.down_proj")
        adapters = {f"{place}.lora_{side}.default.weight" for place in places for side in "AB"}
        assert set(own) == {*adapters, f"{layer}.input_layernorm.modules_to_save.default.weight"}
    assert list(found.head) == [f"{inner}.lm_head.modules_to_save.default.weight"]
    assert not found.rest
    assert not found.embeddings


def test_adapters_of_some_layers_and_of_the_ends() -> None:
    where = LoraConfig(r=2, target_modules=r".*(2\.self_attn\.v_proj|embed_tokens)", modules_to_save=["score"])
    model = get_peft_model(LlamaForSequenceClassification(config()), where)
    found = anatomy_of(model)
    assert list(found.layers) == ["base_model.model.model.layers.2"]
    assert [name.split(".")[-2] for name in found.embeddings] == ["lora_embedding_A", "lora_embedding_B"]
    assert list(found.head) == ["base_model.model.score.modules_to_save.default.weight"]


def test_two_names_for_one_model() -> None:
    for names in (("model", "backbone"), ("backbone", "model")):
        whole = llama()
        model = Lit(**{name: whole if name == "model" else whole.model for name in names})
        for path in ("auto", "backbone.layers", "model.model.layers", "layers"):
            found = anatomy_of(model, path)
            assert [len(own) for own in found.layers.values()] == [9, 9, 9]
            assert (len(found.embeddings), len(found.head), len(found.rest)) == (1, 1, 1)
    tower = Tower()
    first = Lit(first=tower.layers[0], tower=tower)
    assert [len(own) for own in anatomy_of(first).layers.values()] == [4, 4, 4]
