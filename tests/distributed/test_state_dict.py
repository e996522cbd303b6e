"""The state of an optimizer on shards is saved as one process would have it, and loaded from there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_paro.sharding import load_optimizer_state_dict, optimizer_state_dict
from tests.custom_optimizers import HeavyBall
from tests.distributed.pool import Pool, WorkerError
from tests.distributed.sessions import Bank, Cell, Session, Setting, start

MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "fused Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=1),
    "custom": HeavyBall,
}
HALVES = ("first", "second")


class RichCell(Cell):
    """Also parameters that are frozen, never used, tied or without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.nothing = nn.Parameter(torch.randn(0, 2))
        self.tied = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.tied.T @ self.weight) + self.frozen.sum() + self.nothing.sum()


class RichBank(Bank):
    def __init__(self, names: Any) -> None:
        super().__init__(())
        self.cells = nn.ModuleDict({f"{name} {half}": RichCell() for name in names for half in HALVES})


def build(names: Collection[str] = tuple(MAKES)) -> nn.Module:
    return RichBank(names).double()


FEW = ("AdamW", "SGD", "custom")  # where there are many settings
build_few = partial(build, FEW)


rich_session = partial(start, units={RichCell})


def groups_of(module: nn.Module, name: str, rate: float) -> list[dict[str, Any]]:
    """Groups that jump between flats, in an order of their own."""
    one, two = (module[f"{name} {half}"] for half in HALVES)
    return [
        {"params": [two.weight, one.weight]},
        {"params": [one.bias, two.unused, two.nothing, one.scale, two.frozen], "lr": rate / 2},
        {"params": [two.bias, one.frozen, one.nothing, two.scale, one.unused], "lr": rate / 3},
    ]


def attached(session: Session, rate: float = 0.1) -> dict[str, Optimizer]:
    names = dict.fromkeys(name.rsplit(" ", 1)[0] for name in session.module.cells)
    return {name: session.attach(MAKES[name](groups_of(session.module, name, rate))) for name in names}


def train(session: Session, optimizers: dict[str, Optimizer], steps: range) -> None:
    for step in steps:
        session.backward(step)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def state_of(session: Session, optimizer: Optimizer) -> dict[str, Any]:
    return optimizer.state_dict() if session.engine is None else optimizer_state_dict(session.engine, optimizer)


def different(actual: Any, expected: Any, path: str = "") -> list[str]:
    """Where two states differ: keys, types, dtypes, shapes, devices, and values beyond 1e-12."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        found = [f"{path}: {key!r} only on one side" for key in actual.keys() ^ expected.keys()]
        shared = actual.keys() & expected.keys()
        return found + [line for key in shared for line in different(actual[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)) and type(actual) is type(expected) and len(actual) == len(expected):
        pairs = enumerate(zip(actual, expected, strict=True))
        return [line for i, pair in pairs for line in different(*pair, f"{path}[{i}]")]
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        same = (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
        same = same and bool(torch.isfinite(actual).all()) and torch.allclose(actual, expected, rtol=1e-12, atol=1e-14)
    else:
        same = type(actual) is type(expected) and actual == expected
    return [] if same else [f"{path}: {actual} instead of {expected}"]


def _save(settings: list[Setting]) -> list[str]:
    alone = start(build)
    optimizers = attached(alone)
    train(alone, optimizers, range(3))
    expected = {name: state_of(alone, optimizer) for name, optimizer in optimizers.items()}
    states = expected["AdamW"]["state"]
    assert len(states) == 8, "weight, bias, scale and nothing, of two cells"
    assert {len(state) for state in states.values()} == {4}

    found = []
    for setting in settings:
        session = rich_session(build, setting)
        optimizers = attached(session)
        train(session, optimizers, range(3))
        for closed in (False, True):
            if closed:
                session.values()
            for name, optimizer in optimizers.items():
                state = state_of(session, optimizer)
                wrong = different(state, expected[name]) if session.rank == 0 else ["not empty"] if state else []
                found += [f"{setting}, {name}, {closed=}: {line}" for line in wrong]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        [Setting("nnn"), Setting("iig"), Setting("gig", 4)],
        pytest.param([Setting("nig"), Setting("ggg"), Setting("iii", 1)], marks=pytest.mark.full),
    ],
)
def test_a_saved_state_is_that_of_one_process_before_and_after_close(pool: Pool, settings: list[Setting]) -> None:
    for wrong in pool.run(_save, settings):
        assert not wrong, "\n".join(wrong)


def _save_and_continue(build: Callable[[], nn.Module], saved_by: Setting | None, settings: list[Setting]) -> list[str]:
    """Three steps in one setting, two more in each of the others, first of which is one process without an engine."""
    first = start(build) if saved_by is None else rich_session(build, saved_by)
    optimizers = attached(first)
    train(first, optimizers, range(3))
    states = {name: state_of(first, optimizer) for name, optimizer in optimizers.items()}
    first.values()
    values = first.module.state_dict()
    box = [states]  # every rank reads the file that rank 0 has written
    torch.distributed.broadcast_object_list(box, 0)
    (states,) = box

    found = []
    expected: dict[str, Any] = {}
    for setting in (None, *settings):
        module = build()
        module.load_state_dict(values)
        session = Session(module) if setting is None else Session(module, setting, units={RichCell})
        optimizers = attached(session, rate=99.0)  # the state's own must win
        loaded = copy.deepcopy(states)  # torch keeps the tensors that it loads, and changes them
        for name, optimizer in optimizers.items():
            if session.engine is None:
                optimizer.load_state_dict(loaded[name])
            else:
                load_optimizer_state_dict(session.engine, optimizer, loaded[name])
        train(session, optimizers, range(3, 5))
        results: dict[str, Any] = {name: state_of(session, optimizer) for name, optimizer in optimizers.items()}
        results = {"optimizers": results} if session.rank == 0 else {}
        session.values()
        results["module"] = dict(module.state_dict())
        expected = expected or results
        wrong = different(results, {key: expected[key] for key in results})
        found += [f"{saved_by} to {setting}: {line}" for line in wrong]
    return found


def test_a_plain_state_continues_in_every_partition(pool: Pool, some: tuple[str, ...]) -> None:
    for wrong in pool.run(_save_and_continue, build_few, None, list(map(Setting, some))):
        assert not wrong, "\n".join(wrong)


def test_a_sharded_state_continues_in_one_process_and_other_topologies(pool: Pool) -> None:
    for wrong in pool.run(_save_and_continue, build, Setting("iig"), [Setting("ggg", 1), Setting("nig", 4)]):
        assert not wrong, "\n".join(wrong)


class Versioned(HeavyBall):
    """Adds to its state dict, as optimizers with a format of their own do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.version = 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.version = state_dict["version"]
        super().load_state_dict(state_dict)


class NarrowMomentum(HeavyBall):
    """State of a dtype of the group's own, in a list where the group says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=group["dtype"]))
                    momentum.add_(p.grad)
                    p.sub_(momentum, alpha=0.1)


def _special_states() -> dict[str, Any]:
    """On rank 0: states of two optimizers, by one process and by four."""
    results: dict[str, Any] = {}
    for setting in (None, Setting("iig")):
        session = start(lambda: Bank("ab").double(), setting)
        one, two = session.module["a"], session.module["b"]
        versioned = session.attach(Versioned([("w", one.weight), ("b", one.bias), ("s", one.scale)]))
        groups = [{"params": [two.weight], "dtype": torch.float32}, {"params": [two.bias], "dtype": torch.float64}]
        narrow = session.attach(NarrowMomentum(groups))
        versioned.version = 7
        train(session, {"versioned": versioned, "narrow": narrow}, range(2))
        results[str(setting)] = [state_of(session, optimizer) for optimizer in (versioned, narrow)]
        if session.engine is not None:
            state = torch.distributed.broadcast_object_list(box := [results[str(setting)][0]], 0) or box[0]
            versioned.version = 0
            load_optimizer_state_dict(session.engine, versioned, state)
            assert versioned.version == 7
            assert versioned.state["steps"] == 2
            assert versioned.param_groups[0]["param_names"] == ["w", "b", "s"]
        session.values()
    return results if session.rank == 0 else {}


def test_names_extra_entries_and_dtypes_of_state_are_kept(pool: Pool) -> None:
    results = pool.run(_special_states)[0]
    assert results["None"][0]["version"] == 7
    assert results["None"][0]["param_groups"][0]["param_names"] == ["w", "b", "s"]
    assert [state["momentum"].dtype for state in results["None"][1]["state"].values()] == [torch.float32, torch.float64]
    wrong = different(results["iig 2x2"], results["None"])
    assert not wrong, "\n".join(wrong)


class PerRank(HeavyBall):
    """Keeps what depends on the slice: a number, and tensors in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and group["key"] == "norm":
                    self.state[p]["norm"] = p.grad.norm()
                elif p.grad is not None:
                    self.state[p]["past"] = [p.grad.clone()]
                p.sub_(p.grad)


def _unsaveable(key: str) -> None:
    session = start(lambda: Bank("a").double(), Setting("nng"))
    optimizer = session.attach(PerRank([{"params": [session.module["a"].weight], "key": key}]))
    train(session, {"": optimizer}, range(1))
    state_of(session, optimizer)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (
            "norm",
            "'norm' of 'cells.a.weight' in the state of PerRank is neither of the parameter's shape nor the same",
        ),
        ("past", "PerRank keeps tensors of its parameters' shape inside a list, as 'past' of 'cells.a.weight': they"),
    ],
)
def test_state_that_cannot_be_saved_whole_is_named_on_all_ranks(pool: Pool, key: str, reason: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_unsaveable, key)
    assert all(reason in str(message) and "HINT" in str(message) for message in caught.value.messages())


def _load_others() -> list[str]:
    session = start(lambda: Bank("a").double(), Setting("iig"))
    optimizer = session.attach(torch.optim.AdamW(session.module["a"].parameters()))
    plain = Bank("ab").double()
    flipped = nn.Parameter(plain["a"].weight.detach().T.contiguous())
    others = [
        torch.optim.AdamW(plain.parameters()),
        torch.optim.AdamW([{"params": [plain["a"].weight]}, {"params": [plain["a"].bias, plain["a"].scale]}]),
        torch.optim.AdamW([flipped, plain["a"].bias, plain["a"].scale]),
    ]
    messages = []
    for other in others:
        for p in (*plain.parameters(), flipped):
            p.grad = torch.ones_like(p)
        other.step()
        with pytest.raises(ValueError, match="HINT") as caught:
            load_optimizer_state_dict(session.engine, optimizer, other.state_dict())
        messages.append(str(caught.value))
    assert not optimizer.state
    session.values()
    return messages


def test_the_state_of_another_optimizer_is_refused_with_the_numbers(pool: Pool) -> None:
    for count, groups, shape in pool.run(_load_others):
        assert "the checkpoint's AdamW has param groups of [6] parameters, this one of [3]. HINT: build" in count
        assert "the checkpoint's AdamW has param groups of [1, 2] parameters, this one of [3]. HINT: build" in groups
        assert "has 'exp_avg' of shape (3, 5) for parameter 'cells.a.weight', whose shape is (5, 3). HINT" in shape
