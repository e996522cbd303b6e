"""What is exported computes what the LightningModule did, whatever the model and the format."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils.parametrizations import weight_norm
from torch.sparse import SparseSemiStructuredTensor

from lightning_paro.algorithms.supar import Masks, SuParPlan, export, load_masked, save_masked
from lightning_paro.algorithms.supar.exports.semi_structured import Timing, Timings, check_groups, measure
from lightning_paro.algorithms.supar.exports.sparse_linear import SparseLinear
from lightning_paro.algorithms.supar.masks import draw_mask
from lightning_paro.algorithms.supar.scales import Multiplied, hooks_of
from lightning_paro.callbacks import SparseMask
from lightning_paro.mixins import SuParMixin
from lightning_paro.sharding._ghost import released_class
from tests.distributed.supar import Net

TOKENS = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))
WIDTH = 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 30, "tie_word_embeddings": False, "max_position_embeddings": 16,
    "pad_token_id": 0,
}  # fmt: skip
GPT2_SIZES: dict[str, Any] = {"vocab_size": 30, "n_positions": 8, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
Build = Callable[[], nn.Module]


def of(family: str, head: str = "ForCausalLM", **options: Any) -> Build:
    sizes = GPT2_SIZES if family == "GPT2" else SIZES
    return lambda: getattr(hf, f"{family}{head}")(getattr(hf, f"{family}Config")(**{**sizes, **options}))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)
    )  # fmt: skip


def encoder(batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(nn.Embedding(30, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 30))


class Cross(nn.Module):
    """Attention of torch whose keys are narrower, so that it has a matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.narrow = nn.Linear(WIDTH, 16)
        self.attention = nn.MultiheadAttention(WIDTH, 4, kdim=16, vdim=16, batch_first=True)
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        narrow = self.narrow(x)
        return self.head(self.attention(query=x, key=narrow, value=narrow)[0])  # type: ignore[no-any-return]


def tied() -> nn.Module:
    """A head that is tied to the embeddings as in plain torch."""
    model = nn.Sequential(nn.Embedding(30, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 30))
    model[4].weight = model[0].weight
    return model


class Module(SuParMixin, LightningModule):
    def __init__(self, build: Build, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build()
        density = {} if "masks" in options else {"density": 0.75}
        plan: dict[str, Any] = {
            "base_width": 8, **density, "alpha_input": 3.0, "alpha_output": 1.5, "init_std": 0.3, **options
        }  # fmt: skip
        self.supar_setup(SuParPlan.from_model(self, **plan))

    def forward(self, batch: Tensor) -> Tensor:
        return logits(self.model, batch)


def logits(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(input_ids=batch) if isinstance(model, hf.PreTrainedModel) else model(batch)
    return out.logits if hasattr(out, "logits") else out  # type: ignore[no-any-return]


@torch.no_grad()
def trained(module: Any) -> Any:
    """As if trained: no tensor is as it was drawn, biases and norms neither; masked weights are zero."""
    generator = torch.Generator().manual_seed(1)
    module.double().eval()
    for name, parameter in module.named_parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        own = name.removeprefix(module._supar_prefix)
        if own in module.supar_plan.sparse:
            parameter.mul_(module.supar_masks.mask(module, name))
    return module


def batch_of(module: nn.Module) -> Tensor:
    first = next(part for part in module.modules() if isinstance(part, (nn.Embedding, nn.Linear)))
    return TOKENS if isinstance(first, nn.Embedding) else torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 7)


@torch.no_grad()
def assert_same(exported: nn.Module, module: nn.Module, bound: float = 1e-10) -> None:
    """Logits, which depend on every factor."""
    batch = batch_of(module)
    torch.testing.assert_close(logits(exported, batch), module(batch), rtol=0, atol=bound)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    """In low precision: as a share of the largest logit."""
    assert (found - expected).abs().max() < bound * expected.abs().max()


MODELS: dict[str, Build] = {
    "gpt2-tied": of("GPT2", "LMHeadModel"),
    "gpt2": of("GPT2", "LMHeadModel", tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "llama": of("Llama", attention_bias=True),
    "llama-tied": of("Llama", tie_word_embeddings=True),
    "mistral": of("Mistral"),
    "qwen2": of("Qwen2"),
    "qwen3": of("Qwen3", head_dim=8),
    "gemma2": of("Gemma2", hidden_size=16, head_dim=8, tie_word_embeddings=True, attn_logit_softcapping=2.0),
    "olmo2": of("Olmo2"),
    "phi": of("Phi", num_key_value_heads=4, qk_layernorm=True),
    "phi3": of("Phi3"),
    "neox": of("GPTNeoX"),
    "opt": of("OPT", ffn_dim=48, word_embed_proj_dim=WIDTH, tie_word_embeddings=True),
    "bert-tied": of("Bert", "ForMaskedLM", tie_word_embeddings=True),
    "granite": of("Granite"),
    "granite-tied": of("Granite", tie_word_embeddings=True),
}
PLAIN: dict[str, Build] = {
    "mlp": mlp,
    "encoder": encoder,
    "cross": Cross,
    "tied": tied,
}


@pytest.mark.parametrize("parameterization", ["supar", "sp"])
@pytest.mark.parametrize("name", [*MODELS, *PLAIN])
def test_logits_are_the_same(name: str, parameterization: Any) -> None:
    module = trained(Module({**MODELS, **PLAIN}[name], parameterization=parameterization))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = batch_of(module)
    expected = module(batch).detach()
    exported = export(module.train())
    assert module.training
    module.eval()
    assert_same(exported, module)
    assert type(exported) is type(module.model)
    assert not list(hooks_of(exported))
    assert not exported.training
    assert torch.equal(module(batch), expected), "the module itself was changed"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    if name == "tied" and parameterization == "sp":
        assert exported[0].weight is exported[4].weight  # type: ignore[index]


@pytest.mark.parametrize("parameterization", ["supar", "sp"])
@pytest.mark.parametrize("name", MODELS)
def test_stock_classes_load_it(name: str, parameterization: Any, tmp_path: Path) -> None:
    module = trained(Module(MODELS[name], parameterization=parameterization))
    exported: Any = export(module)
    exported.save_pretrained(tmp_path)
    again = type(exported).from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(again, module)
    is_untied = parameterization == "supar" and not name.startswith("granite")
    if name.endswith("-tied"):
        assert again.config.tie_word_embeddings is not is_untied
        assert exported.config.tie_word_embeddings is not is_untied
        ends = exported.get_input_embeddings().weight, exported.get_output_embeddings().weight
        assert (ends[0] is ends[1]) is not is_untied
        assert bool(exported.all_tied_weights_keys) is not is_untied


def test_norms_that_multiply_with_one_plus_weight() -> None:
    sizes = {**SIZES, "hidden_size": 16, "head_dim": 8}
    module = trained(Module(lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes))))
    assert_same(export(module), module, 1e-6)  # they compute in float32


def test_factors_of_one_leave_embeddings_tied() -> None:
    module = trained(Module(MODELS["gpt2-tied"], alpha_input=1.0, alpha_output=4.0))
    exported: Any = export(module)
    assert_same(exported, module)
    assert exported.config.tie_word_embeddings
    assert exported.lm_head.weight is exported.transformer.wte.weight


def test_a_module_without_a_child_that_holds_all() -> None:
    """Then it is the module that is copied, and has no plan any more."""
    module = trained(Net())
    module.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    module.state_dict()
    for to, kind in (("dense", nn.Linear), ("csr", SparseLinear)):
        exported: Any = export(module, to=to)  # type: ignore[arg-type]
        torch.testing.assert_close(exported(TOKENS % 11), module(TOKENS % 11), rtol=0, atol=1e-10)
        assert type(exported.layers[0].up) is kind
        assert exported.supar_plan is None
        assert exported._trainer is None
        assert not any(name.endswith("_mask") for name in exported.state_dict())
        again = copy.deepcopy(exported)
        again.load_state_dict(exported.state_dict())


# ---- granite --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameterization", ["supar", "sp"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "granite", "granite-tied"])
def test_granite(name: str, parameterization: Any, tmp_path: Path) -> None:
    module = trained(Module(MODELS[name], parameterization=parameterization))
    exported: Any = export(module, to="granite")
    assert type(exported) is hf.GraniteForCausalLM
    assert_same(exported, module)
    for own, value in module.model.state_dict().items():
        assert torch.equal(value, exported.state_dict()[own])
    is_tied = exported.lm_head.weight is exported.model.embed_tokens.weight
    assert is_tied is exported.config.tie_word_embeddings is name.endswith("-tied")
    if parameterization == "supar":
        config = exported.config
        assert config.embedding_multiplier == 3
        assert config.attention_multiplier == pytest.approx(1 / 8)
        assert config.logits_scaling == pytest.approx(4 / 1.5)
    exported.save_pretrained(tmp_path)
    assert_same(hf.GraniteForCausalLM.from_pretrained(tmp_path, dtype=torch.float64), module)


def test_what_is_no_granite() -> None:
    with pytest.raises(ValueError, match="a Qwen2ForCausalLM is no Granite.* HINT: to='dense'"):
        export(trained(Module(MODELS["qwen2"])), to="granite")
    module = trained(Module(MODELS["llama"]))
    module.model.model.layers[0].mlp.up_proj.register_forward_hook(Multiplied(2.0))
    with pytest.raises(ValueError, match="'model.layers.0.mlp.up_proj' is multiplied, which Granite"):
        export(module, to="granite")


# ---- sparse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["csr", "bsr"])
@pytest.mark.parametrize("name", ["gpt2-tied", "llama", "mlp", "encoder"])
def test_compressed(name: str, to: Any) -> None:
    masks = Masks("block", density=0.5, block=8) if to == "bsr" else Masks(density=0.5)
    module = trained(Module({**MODELS, **PLAIN}[name], masks=masks))
    with pytest.warns(UserWarning, match="stay dense") if name == "encoder" else torch.no_grad():
        exported = export(module, to=to)
    assert_same(exported, module)
    sparse = [part for part in exported.modules() if isinstance(part, SparseLinear)]
    assert len(sparse) == {"gpt2-tied": 8, "llama": 14, "mlp": 1, "encoder": 4}[name]
    kept = sum(len(part.values.flatten()) for part in sparse) / sum(
        part.in_features * part.out_features for part in sparse
    )
    assert kept == pytest.approx(0.5, abs=0.01)
    assert {part.weight.layout for part in sparse} == {torch.sparse_csr if to == "csr" else torch.sparse_bsr}
    with torch.inference_mode():
        torch.testing.assert_close(logits(exported, batch_of(module)), module(batch_of(module)), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("masks", "block", "share"),
    [(Masks("random", density=0.25), None, 0.5), (Masks("block", density=0.25, block=16), 16, 0.25)],
    ids=["csr", "bsr"],
)
def test_memory_of_a_quarter_of_the_weights(masks: Masks, block: int | None, share: float) -> None:
    weight = torch.randn(1024, 1024) * draw_mask(masks, "weight", (1024, 1024), 1, 0.25)
    held = sum(buffer.nbytes for buffer in SparseLinear(weight, None, block).buffers())
    assert share < held / weight.nbytes < 1.005 * share


def test_compressed_can_be_saved_copied_and_cast() -> None:
    module = trained(Module(MODELS["gpt2-tied"]))
    exported = export(module, to="csr")
    file = io.BytesIO()
    torch.save(exported.state_dict(), file)
    file.seek(0)
    again = copy.deepcopy(exported)
    for value in again.state_dict().values():
        value.zero_()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_same(again, module)
    assert logits(again.float(), TOKENS).dtype is torch.float32
    assert "CSR, density=0.75" in str(again)


def test_24_is_measured_and_the_faster_one_is_taken() -> None:
    """With a stand-in for the clock and for the kernels."""
    layers = {"a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "c": nn.Linear(4, 8), "d": nn.Linear(4, 4)}
    sparse, asked = nn.Linear(1, 1), []

    def convert(layer: nn.Module) -> nn.Module:
        if layer is layers["d"]:
            raise RuntimeError("shape is not supported")
        found = copy.deepcopy(layer)
        found.register_module("mark", sparse)
        return found

    def timer(call: Any) -> float:
        layer, values = call.__defaults__
        asked.append(tuple(values.shape))
        return {(8, True): 10.0, (8, False): 20.0, (4, True): 20.0, (4, False): 10.0}[
            values.shape[1], hasattr(layer, "mark")
        ]

    found = measure(layers, 5, timer, convert)
    assert found == (
        Timing((4, 8), 2, 20.0, 10.0), Timing((8, 4), 1, 10.0, 20.0), Timing((4, 4), 1, 10.0, float("inf"))
    )  # fmt: skip
    assert [timing.is_sparse for timing in found] == [True, False, False]
    assert asked == [(5, 8), (5, 8), (5, 4), (5, 4), (5, 4)]
    text = str(Timings("stand-in", "bfloat16", 5, found))
    assert re.search(r"4 x 8 .* 2 .* 20.0 .* 10.0 .* 2:4", text)
    assert re.search(r"4 x 4 .* not supported .* dense", text)


def test_24_needs_masks_of_24_and_cuda() -> None:
    check_groups("weight", torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1]]).bool(), 1)
    check_groups("weight", torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1]]).bool().t(), 0)
    with pytest.raises(ValueError, match="the mask of 'weight' keeps 3 of 4 neighbours"):
        check_groups("weight", torch.tensor([[1, 0, 0, 0, 1, 1, 0, 1]]).bool(), 1)
    with pytest.raises(ValueError, match="fan-in of 6; expected a multiple of 4"):
        check_groups("weight", torch.ones(4, 6).bool(), 1)
    with pytest.raises(ValueError, match=r"keeps \d of 4 neighbours.* HINT: train with masks=Masks\('nm'"):
        export(trained(Module(MODELS["llama"])), to="2:4")
    for n, m in ((2, 4), (1, 4), (1, 2)):
        with pytest.raises(ValueError, match="is torch.float64 on cpu; expected bfloat16 or float16 on a CUDA"):
            export(trained(Module(MODELS["gpt2-tied"], masks=Masks("nm", n=n, m=m))), to="2:4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
def test_24_on_a_gpu(name: str) -> None:
    gpt2 = of("GPT2", "LMHeadModel", n_embd=256, n_head=4)
    build = gpt2 if name == "gpt2-tied" else of("Llama", hidden_size=256, intermediate_size=1024)
    module = Module(build, masks=Masks("nm")).to("cuda", torch.bfloat16).eval()
    exported: Any = export(module, to="2:4", rows=512)
    print(exported.timings)
    batch = TOKENS.cuda()
    assert_near(logits(exported, batch), module(batch), 0.05)
    faster = {timing.shape for timing in exported.timings.timings if timing.is_sparse}
    weights = [part.weight for part in exported.modules() if isinstance(part, nn.Linear)]
    sparse = {tuple(weight.shape) for weight in weights if isinstance(weight, SparseSemiStructuredTensor)}
    assert sparse == faster


@pytest.mark.gpu
@pytest.mark.parametrize(("to", "masks"), [("csr", Masks(density=0.5)), ("bsr", Masks("block", 0.5, block=16))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_on_a_gpu(to: Any, masks: Masks, dtype: torch.dtype) -> None:
    module = Module(MODELS["gpt2-tied"], masks=masks).to("cuda", dtype).eval()
    exported, batch = export(module, to=to), TOKENS.cuda()
    assert_near(logits(exported, batch), module(batch), 1e-3 if dtype is torch.float32 else 0.05)


# ---- in a folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-tied", "llama", "mlp"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    module = trained(Module({**MODELS, **PLAIN}[name], seed=3))
    save_masked(module, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"]
    assert SuParPlan.from_dict(json.loads((folder / "plan.json").read_text())) == module.supar_plan
    weights, masks = load_file(folder / "model.safetensors"), load_file(folder / "masks.safetensors")
    assert set(masks) == set(module.supar_plan.sparse)
    for own, mask in masks.items():
        assert torch.equal(mask, module.supar_plan.mask(own))
        assert not weights[own.removeprefix("model.")][~mask].any()
    assert set(weights) == {own for own, _ in module.model.named_parameters()}

    path = str(folder / "masks.safetensors")
    for how in (Masks(density=0.75, seed=4), Masks("file", path=path)):
        other: Any = Module({**MODELS, **PLAIN}[name], masks=how).double().eval()
        load_masked(other, folder)
        assert_same(other, module)
        assert_same(export(other), module)
        for own in masks:
            assert torch.equal(other.supar_masks.mask(other, f"{other._supar_prefix}{own}"), masks[own])


def test_what_is_saved_without_masks(tmp_path: Path) -> None:
    module, other = (trained(Module(mlp, density=1, seed=seed)) for seed in (0, 1))
    save_masked(module, tmp_path)
    load_masked(other, tmp_path)
    assert_same(other, module)


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = trained(Module(mlp))
    monkeypatch.setattr(SuParPlan, "to_dict", lambda self: {"plan": object()})
    with pytest.raises(TypeError):
        save_masked(module, tmp_path / "folder")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="there is something in .* HINT: a new folder"):
        save_masked(module, tmp_path)


def test_what_is_not_loaded(tmp_path: Path) -> None:
    module = trained(Module(mlp))
    save_masked(module, tmp_path / "a")
    for options, said in (
        ({"alpha_input": 2.0}, "alpha_input 3.0 there, 2.0 here"),
        ({"init_std": 0.1}, "'model.0.weight' init_std=0.3 there, init_std=0.1 here"),
    ):
        with pytest.raises(ValueError, match=f"the plan in .* is another: {said}.* HINT"):
            load_masked(Module(mlp, **options), tmp_path / "a")
    (tmp_path / "a" / "masks.safetensors").unlink()
    with pytest.raises(ValueError, match="there is no masks.safetensors in .* HINT"):
        load_masked(module, tmp_path / "a")


@pytest.mark.parametrize("name", ["model.safetensors", "masks.safetensors", "plan.json"])
def test_damaged_files_are_named_and_nothing_is_loaded(tmp_path: Path, name: str) -> None:
    save_masked(trained(Module(mlp)), folder := tmp_path / "a")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    module = Module(mlp)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="/a cannot be read: .* HINT: its files are damaged"):
        load_masked(module, folder)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("change", "said"), [(torch.ones_like, "is not masked as in"), (torch.Tensor.char, "of torch.int8 in .*float32")]
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    module = trained(Module(mlp))
    save_masked(module, folder := tmp_path / "a")
    weights = load_file(folder / "model.safetensors")
    name = str(module.supar_plan.sparse[0]).removeprefix("model.")  # type: ignore[union-attr]
    save_file(weights | {name: change(weights[name])}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        load_masked(Module(mlp), folder)


# ---- refused --------------------------------------------------------------------------------------------------------


class Bare(SuParMixin, LightningModule):
    pass


class Normed(nn.Module):
    """Attention that does with its queries what is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.scaling = 8, 4, 8**-0.5
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.l2 = nn.Softmax(-1)


def normed() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), Normed(), nn.Linear(WIDTH, WIDTH))


def renormed() -> nn.Module:
    return nn.Sequential(nn.Embedding(30, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 30))


def test_refused() -> None:
    for module in (Bare(), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="has no plan; expected a LightningModule with SuParMixin. HINT"):
            export(module)
    module = trained(Module(mlp))
    with pytest.raises(ValueError, match="to='onnx' is not one of dense, granite, csr, bsr, 2:4"):
        export(module, to="onnx")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows=0 must be a whole number"):
        export(module, to="2:4", rows=0)
    with pytest.raises(ValueError, match="masks are of kind 'random'; expected 'block'.* HINT: to='csr'"):
        export(module, to="bsr")
    with pytest.raises(ValueError, match="HINT: module.float"):
        export(trained(Module(mlp)).bfloat16(), to="csr")
    with pytest.raises(ValueError, match="0 masked parameters.* HINT: to='dense'"):
        export(trained(Module(mlp, density=1)), to="csr")


def test_masked_weights_that_are_not_zero_are_refused() -> None:
    module = trained(Module(mlp))
    with torch.no_grad():
        module.model[2].weight.add_(1)
    with pytest.raises(ValueError, match="256 of the 256 masked weights of 'model.2.weight' are not zero. HINT: train"):
        export(module)


def test_parameters_that_are_not_here_are_refused() -> None:
    module = trained(Module(mlp))
    module.model[2].weight = nn.Parameter(module.model[2].weight.detach().to("meta"))
    with pytest.raises(ValueError, match=r"'model.2.weight' \(32, 32\) is on the meta device.* HINT: load"):
        export(module)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    weight = torch.zeros(WIDTH, WIDTH)
    mesh = init_device_mesh("cpu", (1,))
    module.model[2].weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()]))
    with pytest.raises(ValueError, match=r"'model.2.weight' \(32, 32\) is sharded.* HINT: load"):
        export(module)


def test_parameters_that_paro_released_are_refused() -> None:
    module = trained(Module(mlp))
    weight = module.model[2].weight
    weight.__class__ = released_class(weight, "parameter 'model.2.weight'")
    with pytest.raises(ValueError, match=r"'model.2.weight' \(32, 32\) is released by ParoStrategy.* HINT: load"):
        export(module)


def test_a_weight_that_is_computed_is_refused() -> None:
    module = trained(Module(mlp))
    weight_norm(module.model[0])
    with pytest.raises(ValueError, match="which cannot be folded into it"):
        export(module)


def test_a_model_that_was_compiled_in_place_is_copied_as_it_is() -> None:
    module = trained(Module(mlp))
    module.model.compile(backend="eager")
    assert_same(export(module), module)


def test_a_compiled_model_is_refused() -> None:
    module = trained(Module(mlp))
    module.model = torch.compile(module.model, backend="eager")
    with pytest.raises(ValueError, match="'model' is a compiled Sequential.* HINT: export a module that is not"):
        export(module)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (normed, "'2' .Normed. .* 'l2' is not known"),
        (of("Olmo", clip_qkv=1.0), "it clips queries"),
        (renormed, "'0' .Embedding. is multiplied by 3, which cannot be folded"),
    ],
)  # fmt: skip
def test_what_cannot_be_folded_is_refused(build: Build, said: str) -> None:
    module = trained(Module(build))
    with pytest.raises(ValueError, match=said):
        export(module)
    with pytest.raises(ValueError, match=said):
        export(module, to="csr")
    export(trained(Module(build, parameterization="sp")))


def test_masks_of_pruning_and_odd_tensors_are_saved(tmp_path: Path) -> None:
    """A plan that is dense, masks that SparseMask has made, memory that is not contiguous, a buffer with two names."""
    module = Module(MODELS["gpt2-tied"], density=1.0)
    name = "model.transformer.h.0.mlp.c_fc.weight"
    mask = torch.rand(module.get_parameter(name).shape) < 0.5
    torch.save({name: mask}, tmp_path / "given.pt")
    callback = SparseMask(kind="file", path=str(tmp_path / "given.pt"))
    callback._find_masks(module, "fit")
    with torch.no_grad():
        module.get_parameter(name).mul_(mask)
    module.model.one = nn.Buffer(torch.ones(2, 3).t())
    module.model.other = nn.Buffer(module.model.one)
    save_masked(module, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "masks.safetensors")[name], mask)
    again = Module(MODELS["gpt2-tied"], density=1.0)
    again.model.one, again.model.other = nn.Buffer(torch.ones(3, 2)), nn.Buffer(torch.ones(3, 2))
    with pytest.raises(ValueError, match="has masks of 1 tensors, the plan of 0. HINT: a plan with masks=Masks.'file'"):
        load_masked(again, tmp_path / "out")


def test_a_bad_mask_changes_nothing(tmp_path: Path) -> None:
    save_masked(Module(MODELS["gpt2-tied"]), tmp_path / "out")
    masks = load_file(tmp_path / "out" / "masks.safetensors")
    last = list(masks)[-1]
    masks[last] = torch.ones_like(masks[last])
    save_file(masks, tmp_path / "out" / "masks.safetensors")
    module = Module(MODELS["gpt2-tied"], masks=Masks(density=0.75, seed=4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=f"the loaded mask of '{last}' keeps 1 of the weights, the plan says 0.75"):
        load_masked(module, tmp_path / "out")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())
