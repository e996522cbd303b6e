"""The user's own optimizer on shards does what it would do in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.custom_optimizers import (
    AttributeMomentum,
    DecayedAdamW,
    ExtraGradient,
    GlobalStep,
    LayerScaled,
    Lion,
    LoggedAdamW,
    RowScaled,
    SignedAdamW,
)
from tests.distributed.pool import Pool, WorkerError
from tests.distributed.sessions import SPREAD, Bank, Session, Setting, check, differing, loss_of, start

Make = Callable[[Any], Optimizer]


def bank(*names: str) -> Bank:
    return Bank(names).double()


def _known() -> dict[str, Make]:
    """Every elementwise optimizer of torch, in every implementation there is on a CPU."""
    plain: dict[str, Make] = {
        "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
        "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
        "SGD nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "SGD maximize": partial(torch.optim.SGD, lr=0.01, maximize=True),
        "Adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
        "AdamW amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
        "AdamW tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
        "NAdam": partial(torch.optim.NAdam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
        "RAdam": partial(torch.optim.RAdam, lr=0.1, betas=(0.9, 0.5)),
        "Adamax": partial(torch.optim.Adamax, lr=0.1),
        "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
        "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
        "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
        "Rprop": partial(torch.optim.Rprop, lr=0.01),
        "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=2, lambd=0.01),
    }
    fused = {"SGD momentum", "Adam", "AdamW amsgrad", "Adagrad"}
    makes = {f"{name} loop": partial(make, foreach=False) for name, make in plain.items()}
    makes |= {f"{name} foreach": partial(make, foreach=True) for name, make in plain.items() if "tensor" not in name}
    makes |= {f"{name} fused": partial(make, fused=True) for name, make in plain.items() if name in fused}
    return makes


KNOWN = _known()


def _train_each(makes: dict[str, Make], session: Session) -> dict[str, Any]:
    """A cell per optimizer."""
    cells = session.module
    optimizers = [session.attach(make(cells[name].parameters())) for name, make in makes.items()]
    with session.full():
        before = {name: cells[name].weight.clone() for name in makes}
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        session.backward(step)
        for optimizer in optimizers:
            optimizer.step()
    with session.full():
        assert all((cells[name].weight - before[name]).abs().max() > 1e-6 for name in makes), "nothing was trained"
    return session.values()


@pytest.mark.parametrize(
    "partition", ["nnn", "iig", *(pytest.param(p, marks=pytest.mark.full) for p in ("nig", "ggg"))]
)
def test_every_elementwise_optimizer_of_torch_equals_one_process(pool: Pool, partition: str) -> None:
    check(pool.run(differing, partial(_train_each, KNOWN), partial(bank, *KNOWN), [Setting(partition)]))


CUSTOM: dict[str, Make] = {
    "Lion": Lion,
    "subclass": partial(LoggedAdamW, lr=0.1),
    "changed subclass": partial(SignedAdamW, lr=0.1),
    "subclass that moves on and clears gradients": DecayedAdamW,
    "subclass with state from the start": partial(type("MyAdagrad", (torch.optim.Adagrad,), {}), lr=0.1),
    "state in an attribute": AttributeMomentum,
}


def _matrices(make: Make) -> Make:
    return lambda parameters: make([p for p in parameters if p.dim() == 2])


def _train_custom(session: Session) -> dict[str, Any]:
    return _train_each(CUSTOM, session)


def test_an_elementwise_optimizer_of_the_users_equals_one_process(pool: Pool) -> None:
    check(pool.run(differing, _train_custom, partial(bank, *CUSTOM), SPREAD))


def _adafactor(parameters: Any) -> Optimizer:
    from transformers.optimization import Adafactor  # seconds, which only this one needs to spend

    return Adafactor(parameters, lr=0.1, relative_step=False, scale_parameter=True)


MIXING: dict[str, Make] = {
    "Muon": _matrices(partial(torch.optim.Muon, lr=0.1)),
    "Adafactor of torch": partial(torch.optim.Adafactor, lr=0.1),
    "Adafactor of transformers": _adafactor,
    "LAMB": LayerScaled,
    "Shampoo": RowScaled,
    "one step size": GlobalStep,
}


def _train_mixing(session: Session) -> dict[str, Any]:
    values = _train_each(MIXING, session)
    for shards in session.engine.optimizers if session.engine else []:
        shapes = [flat.slots[index].shape for flat, index in shards.members()]
        assert [entry.shape for entry in shards.entries()] == shapes
    return values


def test_a_mixing_optimizer_equals_one_process_where_its_state_is_whole(pool: Pool) -> None:
    whole = [Setting("nnn", 4), Setting("nnn", 2), Setting("nnn", 1), Setting("iii", 1)]  # I is N in groups of one
    check(pool.run(differing, _train_mixing, partial(bank, *MIXING), whole))


def _attach(kind: Make, setting: Setting) -> None:
    session = start(partial(bank, "a"), setting)
    session.attach(kind([session.module["a"].weight]))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Muon, LayerScaled])
def test_a_mixing_optimizer_is_refused_on_all_ranks_where_its_state_is_split(pool: Pool, kind: Make) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_attach, kind, Setting("nig"))
    for message in caught.value.messages():
        assert message is not None
        assert message.startswith(f"ValueError: {kind.__name__} ")
        assert "shards of a parameter. HINT: use an elementwise optimizer" in message


def _loss_of_one(name: str, module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(module[name], x, y)


CLOSURES: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "passed on": partial(LoggedAdamW, lr=0.1),
    "called twice": ExtraGradient,
}
MIXING_CLOSURES: dict[str, Make] = {
    "called twice": ExtraGradient,
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}


def _train_with_closures(makes: dict[str, Make], session: Session) -> dict[str, Any]:
    losses = {}
    for name, make in makes.items():
        optimizer = session.attach(make(session.module[name].parameters()))
        for step in range(2):

            def closure(name: str = name, optimizer: Optimizer = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = session.backward(step, partial(_loss_of_one, name))
                if session.engine is not None:  # LBFGS must see the loss of the whole batch
                    torch.distributed.all_reduce(loss.div_(4))
                return loss

            loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
            losses[f"{name} {step}"] = loss
    return {**losses, **session.values()}


def test_a_step_with_a_closure_equals_one_process(pool: Pool) -> None:
    """Also one that moves between two calls, and looks at the loss and the gradient where it is."""
    train = partial(_train_with_closures, CLOSURES)
    check(pool.run(differing, train, partial(bank, *CLOSURES), SPREAD))
    train = partial(_train_with_closures, MIXING_CLOSURES)
    check(pool.run(differing, train, partial(bank, *MIXING_CLOSURES), [Setting("nnn")]))


def _train_groups(session: Session) -> dict[str, Any]:
    """Groups with options of their own, under a scheduler that changes two of them; a third group joins later."""
    one, two = session.module["a"], session.module["b"]
    two.requires_grad_(False)
    numbers = [one.bias, one.scale]
    optimizer = session.attach(
        torch.optim.AdamW(
            [
                {"params": [one.weight], "weight_decay": 0.3, "name": "matrices"},
                {"params": numbers, "lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6},
            ],
            lr=0.1,
        )
    )
    groups = list(optimizer.param_groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.3], total_steps=6)
    rates = []
    for step in range(6):
        if step == 4:
            two.requires_grad_(True)
            optimizer.add_param_group({"params": two.parameters(), "lr": 0.05, "amsgrad": True})
            assert len(optimizer.param_groups) == 3
        optimizer.zero_grad()
        session.backward(step)
        optimizer.step()
        rates += [value for group in optimizer.param_groups for value in (group["lr"], *group["betas"])]
        if step < 4:  # the scheduler knows two groups
            scheduler.step()
    assert all(now is then for now, then in zip(optimizer.param_groups, groups, strict=False))
    assert optimizer.param_groups[0]["name"] == "matrices"
    if session.engine is not None:
        (shards,) = session.engine.optimizers
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in held] == [id(p) for p in (one.weight, *numbers, *two.parameters())], "the user's own"
        assert [len(group) for group in shards.groups] == [1, 2, 3]
    return {"rates": rates, **session.values()}


def test_groups_schedulers_and_groups_added_later_equal_one_process(pool: Pool) -> None:
    check(pool.run(differing, _train_groups, partial(bank, "a", "b"), SPREAD))


def _train_with_hooks(session: Session) -> dict[str, Any]:
    """Hooks of the user's own, from before and after the optimizer went on shards."""
    one = session.module["a"]
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    seen: dict[str, Tensor] = {}
    calls: list[str] = []

    def look(when: str, *_: Any) -> None:
        calls.append(when)
        with session.full():
            seen[f"{when} {len(calls)}"] = one.weight.detach().clone()

    def halve(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(partial(look, "before"))
    optimizer.register_step_post_hook(partial(look, "after"))
    session.attach(optimizer)
    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(partial(look, "after, registered late"))
    for step in range(2):
        optimizer.zero_grad()
        session.backward(step)
        optimizer.step()
    assert calls == ["before", "after", "after, registered late"] * 2
    assert not torch.equal(seen["before 1"], seen["after 2"])
    return {**seen, **session.values()}


def test_step_hooks_fire_and_see_new_values_after_the_step(pool: Pool) -> None:
    check(pool.run(differing, _train_with_hooks, partial(bank, "a"), SPREAD))


def _train_two(session: Session) -> dict[str, Any]:
    """Two optimizers with a part of every flat each, whose steps and zero_grad do not touch the other's gradients."""
    module = session.module
    adam = session.attach(torch.optim.AdamW([p for p in module.parameters() if p.dim() == 2], lr=0.1))
    sgd = session.attach(torch.optim.SGD([p for p in module.parameters() if p.dim() != 2], lr=0.1, momentum=0.5))
    session.backward(0)
    adam.step()
    adam.zero_grad()
    session.backward(1)  # for sgd on top of the first
    sgd.step()
    sgd.zero_grad(set_to_none=False)
    adam.step()
    sgd.step()  # with gradients of zero: momentum moves on
    adam.zero_grad()
    sgd.zero_grad()
    sgd.step()  # without gradients: nothing moves
    session.backward(2)
    adam.step()
    sgd.step()
    return session.values()


def test_two_optimizers_that_share_a_flat_leave_each_others_gradients_alone(pool: Pool) -> None:
    check(pool.run(differing, _train_two, partial(bank, "a", "b"), SPREAD))


def _train_two_windows(session: Session) -> dict[str, Any]:
    """One optimizer accumulates over a window while another, with parameters in the same flats, steps in between."""
    module = session.module
    matrices = [p for p in module.parameters() if p.dim() == 2]
    numbers = [p for p in module.parameters() if p.dim() != 2]
    slow = session.attach(torch.optim.AdamW(matrices, lr=0.1))
    fast = session.attach(torch.optim.SGD(numbers, lr=0.1))

    def only(trained: list[nn.Parameter]) -> None:  # as LightningOptimizer.toggle_model does
        for p in module.parameters():
            p.requires_grad_(any(p is one for one in trained))

    for step in range(4):
        only(numbers)
        session.backward(2 * step)
        only(matrices)
        session.backward(2 * step + 1, sync=step % 2 == 1)
        fast.step()
        fast.zero_grad()
        if step % 2 == 1:
            slow.step()
            slow.zero_grad()
    only(numbers)
    session.backward(9, sync=False)
    fast.zero_grad()  # nothing is left of the blocked backward
    fast.step()
    return session.values()


def test_an_optimizer_steps_while_another_accumulates_in_the_same_flat(pool: Pool) -> None:
    check(pool.run(differing, _train_two_windows, partial(bank, "a", "b"), SPREAD))


def _misuse() -> list[str]:
    session = start(partial(bank, "a", "b"), Setting("iig"))
    one, two = session.module["a"], session.module["b"]
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    marker = optimizer.zero_grad = lambda: None  # somebody's own
    session.attach(optimizer)
    messages = []
    for parameters in ([nn.Parameter(torch.zeros(2, 3))], [two.bias, one.weight, one.bias]):
        with pytest.raises(ValueError, match=r"HINT|more than one parameter group") as caught:
            optimizer.add_param_group({"params": parameters})
        messages.append(str(caught.value))
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [two.bias]})
    session.backward(0, sync=False)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    messages.append(str(caught.value))
    session.values()
    assert optimizer.zero_grad is marker
    assert "add_param_group" not in vars(optimizer)
    return messages


def test_wrong_groups_and_steps_at_the_wrong_time_are_refused(pool: Pool) -> None:
    foreign, twice, blocked = pool.run(_misuse)[0]
    assert "tensor of shape (2, 3) is not a parameter of Bank. HINT: build optimizers in" in foreign
    assert "some parameters appear in more than one parameter group" in twice  # torch's own
    assert "SGD.step() was called while accumulated gradients of unit 'cells.a' and 1 more have not been" in blocked


def _skip(nonfinite: str, size: float) -> list[float]:
    session = start(partial(bank, "a"), Setting("iig"), nonfinite=nonfinite)
    optimizer = session.attach(torch.optim.SGD([session.module["a"].bias], lr=1e-200))
    spoiled = partial(_spoiled_loss, size if session.rank == 2 else 1.0)
    with session.full():
        before = session.module["a"].bias.clone()
    session.backward(0, spoiled)
    optimizer.step()
    session.values()
    return (session.module["a"].bias - before).tolist()


def _spoiled_loss(factor: float, module: Bank, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(module, x, y) * factor


def test_a_step_is_skipped_for_what_is_not_finite_and_not_for_what_is_large(pool: Pool) -> None:
    for size, is_skipped in ((1e200, False), (float("inf"), True)):  # whose square, and so its norm, is infinite
        for moves in pool.run(_skip, "skip", size):
            assert all(torch.isfinite(torch.tensor(moves)))
            assert all((move == 0) == is_skipped for move in moves), (size, moves)
    with pytest.raises(WorkerError) as caught:
        pool.run(_skip, "raise", float("nan"))
    assert all("nonfinite='raise'. HINT: lower" in str(message) for message in caught.value.messages())
