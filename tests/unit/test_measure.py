"""What a micro-batch costs: activations against closed forms, and a module that knows nothing of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_paro.planner import _measure, measure

ROWS, INPUT, WIDTH, HIDDEN, BLOCKS = 32, 5, 8, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).sum()


KEPT = 4 * ROWS * (INPUT + BLOCKS * (WIDTH + HIDDEN) + WIDTH)
"""Bytes: the inputs of all linear layers; that of the second of a block is also what tanh keeps."""


def rows() -> Tensor:
    return torch.randn(ROWS, INPUT, generator=torch.Generator().manual_seed(1))


def in_units(module: nn.Module, *names: str) -> dict[str, list[nn.Parameter]]:
    """Every parameter with the innermost of these submodules that holds it."""
    units: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for name, parameter in module.named_parameters():
        inside = [unit for unit in names if name.startswith(f"{unit}.")]
        if inside:
            units[max(inside, key=len)].append(parameter)
    return units


def blocks(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    return in_units(module, *(f"blocks.{index}" for index in range(BLOCKS)))


def forward(twin: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return twin(x)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_activations_of_a_perceptron_are_those_of_its_closed_form(streamed: bool) -> None:
    module = Perceptron()
    measured = measure(module, rows, forward, units=blocks(module) if streamed else None)
    assert measured.activations == KEPT
    assert measured.seconds > 0


def test_activations_have_the_compute_dtype() -> None:
    def half(twin: Perceptron, x: Tensor) -> Tensor:
        assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
        return twin(x.bfloat16())

    assert measure(Perceptron(), rows, half, compute_dtype=lambda own: torch.bfloat16).activations == KEPT // 2


def test_views_of_one_storage_count_once_and_parameters_and_buffers_do_not() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(INPUT))
            self.register_buffer("mask", torch.ones(INPUT))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.exp(x * self.scale * self.mask)
            return (y[:10] * y[10:20] * y.t()[:, 20:30].t()).sum()

    # kept: x, for the scale; y, by exp and, in four views, by the products; the product of ten rows
    assert measure(Views(), rows, forward).activations == 4 * (2 * ROWS * INPUT + 10 * INPUT)


def test_what_is_freed_on_the_way_does_not_add_up() -> None:
    def twice(twin: Perceptron, x: Tensor) -> Tensor:
        twin(x).backward()
        return twin(x)

    assert measure(Perceptron(), rows, twice).activations == KEPT


class Eventful(Perceptron):
    """Changes whatever a module may hold, and holds data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(INPUT)
        self.frozen = nn.Linear(INPUT, INPUT).requires_grad_(False)
        self.calls, self.history, self.cache = 0, [torch.zeros(2)], {"sum": torch.zeros(())}
        self.data = TensorDataset(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.history[0] += 1
        self.cache["sum"] += x.sum()
        with torch.no_grad():
            self.outlet.bias.add_(1)
            self.frozen.weight.mul_(2)
        self.blocks[0].up.bias.requires_grad_(False)
        return super().forward(self.frozen(self.norm(x)))


def _state(module: Eventful) -> dict[str, Any]:
    return copy.deepcopy(
        {
            **dict(module.state_dict()),
            "other": (module.calls, len(module.history), module.history[0].tolist(), float(module.cache["sum"])),
            "modes": [child.training for child in module.modules()],
            "grad": [(parameter.requires_grad, parameter.grad) for parameter in module.parameters()],
        }
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_the_module_is_as_before(streamed: bool) -> None:
    module = Eventful()
    module.blocks[1].eval()
    before, parameters = _state(module), list(module.parameters())
    twins = []

    def watched(twin: Eventful, x: Tensor) -> Tensor:
        twins.append(twin)
        return twin(x)

    measure(module, rows, watched, units=blocks(module) if streamed else None)
    after = _state(module)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key], key
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert len(twins) == 5
    twin = twins[0]
    assert twin.calls == 5
    assert twin.data is module.data, "data is not copied"
    assert not twin.blocks[1].training
    assert all(parameter.grad is None for parameter in twin.parameters())
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in twin.parameters()), "memory is given back"


def test_gradients_that_reach_the_module_after_all_are_taken_away() -> None:
    module = Perceptron()
    original = module.blocks[0].forward
    module.blocks[0].forward = lambda x: original(x)
    module.inlet.bias.grad = torch.ones(WIDTH)
    measure(module, rows, forward)
    assert {name for name, parameter in module.named_parameters() if parameter.grad is not None} == {"inlet.bias"}
    assert torch.equal(module.inlet.bias.grad, torch.ones(WIDTH))


class Outer(nn.Module):
    """A unit with a unit inside, whose own parameters are needed before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.after(self.inner(torch.tanh(self.before(x)))).tanh()}


class Nested(nn.Module):
    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.inlet = nn.Linear(INPUT, WIDTH)
        self.first = Block().requires_grad_(False)
        self.outer = Outer()
        self.last = Block()
        if recompute == "inside":
            self.last.forward = partial(checkpoint, self.last.forward, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(self.first(self.inlet(x)))["x"]
        reentrant = {"around": False, "around, reentrant": True}.get(self.recompute)
        x = self.last(x) if reentrant is None else checkpoint(self.last, x, use_reentrant=reentrant)
        return x.square().sum()


@pytest.mark.parametrize("recompute", ["", "inside", "around", "around, reentrant"])
def test_units_that_come_and_go_compute_the_same_gradients(recompute: str) -> None:
    module = Nested(recompute)
    names = ["first", "outer", "outer.inner", "last"]
    units = in_units(module, *names)
    nbytes = {name: sum(p.nbytes for p in parameters) for name, parameters in units.items()}
    gradients: dict[str, Tensor] = {}
    most = 0

    def there(twin: Nested) -> int:
        held = in_units(twin, *names).values()
        return sum(parameter.untyped_storage().nbytes() for some in held for parameter in some)

    def watched(twin: Nested, x: Tensor) -> Tensor:
        def note(name: str, gradient: Tensor) -> None:
            nonlocal most
            gradients[name] = gradient
            most = max(most, there(twin))

        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, name=name: note(name, gradient))
        assert there(twin) == 0
        return twin(x)

    measure(module, rows, watched, units=units)
    module(rows()).backward()
    assert gradients.keys() == {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=0)
    assert most == nbytes["outer"] + nbytes["outer.inner"], "one unit, and the one around it"


def test_moving_parameters_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(_measure, "_now", lambda device: float(next(ticks)))
    module = Perceptron()
    assert measure(module, rows, forward).seconds == 1
    # forward brings each block, backward each but the last, which is still there; a clock that ticks when it is read
    # counts one tick inside of every move, which is subtracted, and one before it
    assert measure(module, rows, forward, units=blocks(module)).seconds == (2 * BLOCKS - 1) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("streamed", [False, True])
def test_on_a_gpu_the_allocator_tells(streamed: bool) -> None:
    module, batch, width = Perceptron(), 2**16, WIDTH
    units = blocks(module) if streamed else None

    def inputs() -> Tensor:
        return torch.randn(batch, INPUT, device="cuda")

    measure(module, inputs, forward, device="cuda", units=units)
    before = torch.cuda.memory_allocated()  # workspaces of the libraries are there to stay
    measured = measure(module, inputs, forward, device="cuda", units=units)
    kept = 4 * batch * (BLOCKS * (width + HIDDEN) + width)  # the input was there before
    assert kept <= measured.activations <= 1.5 * kept
    assert measured.seconds > 0
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert torch.cuda.memory_allocated() == before
