"""LISA with torch.compile: each layer in two variants at most, and a word where it cannot be so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_models import Text, gpt2, llama
from tests.conformance.lisa_runs import Silent, Watch, fit, values
from tests.distributed.lisa import Net

LAYERS = 5
WHOLE = "is compiled as a whole and will be compiled anew for every set of layers .* HINT: compile each layer"


@pytest.fixture(autouse=True)
def _from_scratch() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs what it is given, and counts.

    Args:
        ahead: Whether autograd is traced as well, as inductor's is.
    """

    def __init__(self, ahead: bool) -> None:
        self.graphs = 0
        self._backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward) if ahead else None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return self._backend(graph, inputs) if self._backend else graph.forward  # type: ignore[no-any-return]


def _plain(**options: Any) -> tuple[LISA, dict[str, Tensor]]:
    lisa = LISA(interval=1, **options)
    _, module = fit(lisa, build=Silent, count=20)
    return lisa, values(module)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("wrap", [False, True], ids=["in place", "wrapped"])
@pytest.mark.parametrize("embeddings", [pytest.param("always", marks=pytest.mark.full), "never"])
def test_a_compiled_layer_has_two_variants(ahead: bool, wrap: bool, embeddings: Any) -> None:
    """Trained and frozen; with the embeddings frozen also those before which nothing is trained."""
    counting = Counting(ahead)

    def build() -> Net:
        net = Silent()
        for index, layer in enumerate(net.layers):
            if wrap:
                net.layers[index] = torch.compile(layer, backend=counting, fullgraph=True)
            else:
                layer.compile(backend=counting, fullgraph=True)
        return net

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compiled as a whole.*")
        lisa, watch = LISA(interval=1, train_embeddings=embeddings), Watch()
        _, module = fit(lisa, build=build, callbacks=[watch], count=20)
    expected, truth = _plain(train_embeddings=embeddings)
    assert lisa.periods == expected.periods
    for name, value in values(module).items():
        torch.testing.assert_close(value, truth[name.replace("_orig_mod.", "")], rtol=0, atol=1e-10)
    assert len({active for _, _, active in lisa.periods}) > 6
    assert counting.graphs == (2 if embeddings == "always" else 4)  # the layers share them
    if wrap is False:
        assert lisa.names == [f"layers.{index}" for index in range(LAYERS)]
    assert watch.gradients == watch.states == watch.trained


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pytest.mark.full
def test_layers_of_transformers_compiled_one_by_one(build: Any) -> None:
    counting = Counting(ahead=True)
    results = []
    for compiled in (False, True):
        module = Text(build())
        stack = next(m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == 4)
        for layer in stack if compiled else ():
            layer.compile(backend=counting)
        fit(LISA(interval=1, num_layers=1), module, count=10)
        results.append(values(module))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-10)
    assert 2 <= counting.graphs <= 4 * 2


# ---- as a whole -----------------------------------------------------------------------------------------------------


def _inner_wrapped() -> Any:
    module = Text(llama())
    module.model = torch.compile(module.model, backend="eager")
    return module


def _inner_in_place() -> Any:
    module = Text(llama())
    module.model.compile(backend="eager")
    return module


def _lightning_module() -> Any:
    return torch.compile(Silent(), backend="eager")


def _lightning_module_in_place() -> Any:
    module = Silent()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("build", "name"),
    [
        pytest.param(_inner_wrapped, "'model'", marks=pytest.mark.full),
        (_inner_in_place, "'model'"),
        (_lightning_module, "'Silent'"),
        (_lightning_module_in_place, "'Silent'"),
    ],
)
def test_a_model_compiled_as_a_whole_is_warned_of(build: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=WHOLE) as caught:
        fit(LISA(interval=2), build(), count=2)
    said = [str(warning.message) for warning in caught if re.search(WHOLE, str(warning.message))]
    assert len(said) == 1
    assert said[0].startswith(name)


@pytest.mark.full
def test_it_is_right_all_the_same() -> None:
    """Until torch gives up compiling it, and then as well."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=WHOLE):
        _, module = fit(LISA(interval=1), build=_lightning_module, count=20)
    _, truth = _plain()
    for name, value in truth.items():
        torch.testing.assert_close(module._orig_mod.get_parameter(name).detach(), value, rtol=0, atol=1e-10)
