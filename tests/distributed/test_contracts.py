"""What a user may see and do between the brackets, and what is refused with a message that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.comparing import as_array, differences, values_of
from tests.distributed.loops import (
    ALL,
    SOME,
    TOLERANCE,
    Alone,
    Block,
    Sharded,
    Stack,
    adamw,
    assert_as_alone,
    share,
    train,
)
from tests.distributed.pool import WORLD_SIZE, Pool

P_PARTITIONED = [name for name in ALL if name[0] != "n"]


def _message(action: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    """What ``action`` raises."""
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing was raised"


def _backward(loop: Alone, model: nn.Module, step: int, sync: bool = True) -> None:
    with loop.step():
        loss = loop.mean(lambda rank: model(share(step, rank)).square().mean())
    loop.backward(loss, sync=sync)


def _setup(partition: str, **options: Any) -> tuple[Sharded, Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    loop = Sharded(partition, **options)
    model = Stack().double()
    loop.shard(model)
    return loop, model, loop.attach(adamw(model))


def _alone() -> tuple[Alone, Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack().double()
    return Alone(), model, adamw(model)


# ---- brackets -----------------------------------------------------------------------------------------------


def _bare_backwards(loop: Alone) -> nn.Module:
    """A bare backward is refused, and whoever survives that trains on as if nothing had been."""
    model = Stack().double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        if isinstance(loop, Sharded):
            with loop.step(manual=True):
                loss = model(share(8, loop.rank)).mean()
                text = _message(loss.backward)
                assert "received a gradient outside of a bracketed backward" in text, text
                assert "HINT: in manual optimization call `self.manual_backward(loss)`" in text, text
        optimizer.zero_grad()
        _backward(loop, model, step)
        optimizer.step()
    return model


def test_a_bare_backward_is_refused_and_does_no_harm(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _bare_backwards, few)


def _steps_with_something_left(loop: Alone) -> nn.Module:
    model = Stack().double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        if isinstance(loop, Sharded):
            _backward(loop, model, 9, sync=False)
            text = _message(optimizer.step)
            assert re.search(
                r"AdamW\.step\(\) was called while accumulated gradients of unit '\S+' and 3 more have not been "
                r"reduced over all ranks.* HINT: run the last backward of a window outside",
                text,
            ), text
        optimizer.zero_grad()
        _backward(loop, model, step, sync=False)
        _backward(loop, model, step + 5)
        optimizer.step()
    return model


def test_a_step_with_gradients_left_at_g_is_refused_and_does_no_harm(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _steps_with_something_left, few)


def _graph_older_than_the_step(partition: str) -> str:
    loop, model, optimizer = _setup(partition)
    _backward(loop, model, 0)
    with loop.step():
        stale = model(share(1, loop.rank)).square().mean()
    optimizer.step()
    text = _message(lambda: loop.backward(stale))
    _backward(loop, model, 2)  # the engine lives on
    loop.close()
    return text


def test_a_backward_through_values_from_before_the_step_raises_as_in_one_process(pool: Pool) -> None:
    loop, model, optimizer = _alone()
    _backward(loop, model, 0)
    stale = model(share(1, 0)).square().mean()
    optimizer.step()
    expected = "has been modified by an inplace operation"
    assert expected in _message(stale.backward)
    for partition in SOME:
        for text in pool.run(_graph_older_than_the_step, partition):
            assert expected in text, (partition, text)


def _aborted_steps(loop: Alone) -> nn.Module:
    """Steps that end half way: in forward, between forward and backward, and with the backward never ended."""
    model = Stack().double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        if isinstance(loop, Sharded):
            engine = loop.engine
            engine.step_begin()
            model.blocks[0](model.first(share(8, loop.rank)))
            if step != 0:
                engine.step_end(backward_follows=True)
            if step == 2:
                engine.backward_begin()
            engine.abort()
        optimizer.zero_grad()
        _backward(loop, model, step)
        optimizer.step()
    return model


def test_a_step_may_be_aborted_anywhere(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _aborted_steps, few)


# ---- gradients a user sees ----------------------------------------------------------------------------------


def _seen_gradients(partition: str) -> list[str]:
    loop, model, optimizer = _setup(partition)
    model.blocks[0].a.bias.requires_grad_(False)
    _backward(loop, model, 0)
    found = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name == "blocks.0.a.bias":
            found += [] if gradient is None else [f"{name} needs no gradient and has {gradient}"]
            continue
        if gradient is None or gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            found.append(f"the gradient of {name} is {gradient}")
            continue
        actions = [gradient.norm, lambda g=gradient: g + 1, gradient.clone, gradient.tolist, lambda g=gradient: g[0]]
        for action in [*actions, gradient.detach, lambda g=gradient: torch.isfinite(g)]:
            text = _message(action)
            if f"the gradient of '{name}' lies in shards" not in text or "`trainer.strategy.grad_norm()`" not in text:
                found.append(text)
        found += [] if f"of '{name}'" in repr(gradient) and "shape" in repr(gradient) else [repr(gradient)]
    from lightning.pytorch.utilities import grad_norm

    for action in (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), lambda: grad_norm(model, 2)):
        text = _message(action)
        found += [] if "`trainer.strategy.grad_norm()`" in text else [text]
    loop.close()
    return found


def test_sharded_gradients_are_neither_none_nor_usable(pool: Pool) -> None:
    for partition in ("nni", "nig", "iig", "ggg"):
        for wrong in pool.run(_seen_gradients, partition):
            assert not wrong, f"{partition}: {wrong[:3]}"


def _whole_gradients() -> tuple[dict[str, Any], dict[str, Any], float]:
    loop, model, optimizer = _setup("nnn")
    _backward(loop, model, 0)
    gradients = {name: as_array(p.grad) for name, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    loop.close()
    return gradients, values_of(model), float(norm)


def test_where_the_optimizer_state_is_whole_a_parameter_has_its_gradient(pool: Pool) -> None:
    """And torch's own clipping works on it."""
    loop, model, optimizer = _alone()
    _backward(loop, model, 0)
    expected = {name: as_array(p.grad) for name, p in model.named_parameters()}
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    optimizer.step()
    for gradients, values, its_norm in pool.run(_whole_gradients):
        assert not differences(gradients, expected, TOLERANCE)
        assert not differences(values, values_of(model), TOLERANCE)
        assert its_norm == pytest.approx(norm, rel=TOLERANCE)


def _clear(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    whose, how = way.split()
    zero_grad = model.zero_grad if whose == "module" else optimizer.zero_grad
    zero_grad(set_to_none=how == "none")


def _cleared_in_every_way(loop: Alone) -> nn.Module:
    model = Stack(Block(), Block()).double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step, way in enumerate(["module none", "module zero", "optimizer none", "optimizer zero"]):
        for sync in (True, False):  # cleared after a boundary, and in the middle of a window
            _backward(loop, model, 10 + step, sync=sync)
            _clear(way, model, optimizer)
            _backward(loop, model, step, sync=False)
            _backward(loop, model, step + 5)
            optimizer.step()
            _clear(way, model, optimizer)
    return model


def test_gradients_are_cleared_by_module_and_optimizer_to_none_and_to_zero(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _cleared_in_every_way, few)


def _assigned_gradient(partition: str) -> list[str]:
    loop, model, optimizer = _setup(partition)
    parameter = model.blocks[1].a.weight
    texts = []
    for with_backward in (False, True):
        optimizer.zero_grad()
        if with_backward:
            _backward(loop, model, 0)
        parameter.grad = torch.ones_like(parameter)
        texts.append(_message(optimizer.step))
    loop.close()
    return texts


def test_a_gradient_assigned_by_the_user_is_refused_at_the_step(pool: Pool) -> None:
    for partition in SOME:
        for texts in pool.run(_assigned_gradient, partition):
            for text in texts:
                assert "a gradient was assigned to parameter 'blocks.1.a.weight', but the optimizer works on" in text
                assert "HINT: change gradients through" in text


def _norms(partition: str) -> tuple[float, float, float]:
    torch.manual_seed(0)
    loop = Sharded(partition)
    model = Stack().double()
    loop.shard(model)
    first = loop.attach(adamw(model.blocks))
    second = loop.attach(torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1))
    _backward(loop, model, 0)
    norms = float(loop.engine.grad_norm()), loop.norm(first), loop.norm(second)
    loop.close()
    return norms


def test_the_gradient_norm_is_that_of_the_whole_gradient_on_every_rank(pool: Pool) -> None:
    loop, model, _ = _alone()
    _backward(loop, model, 0)
    blocks = torch.stack([p.grad.square().sum() for p in model.blocks.parameters()]).sum()
    rest = torch.stack([p.grad.square().sum() for m in (model.first, model.last) for p in m.parameters()]).sum()
    expected = [float(total.sqrt()) for total in (blocks + rest, blocks, rest)]
    for partition in ALL:
        for norms in pool.run(_norms, partition):
            assert norms == pytest.approx(expected, rel=TOLERANCE), partition


# ---- released parameters ------------------------------------------------------------------------------------


def _what_a_released_parameter_tells(partition: str) -> list[str]:
    torch.manual_seed(0)
    model = Stack().double()
    facts = {name: (id(p), p.shape, p.dtype, p.numel()) for name, p in model.named_parameters()}
    loop = Sharded(partition)
    loop.shard(model)
    found = []
    if dict(model.named_parameters()).keys() != facts.keys():
        found.append("other names")
    for name, p in model.named_parameters():
        identity, shape, dtype, numel = facts[name]
        unit = name.rsplit(".", 2)[0] if name.startswith("blocks") else "rest"
        same = (
            id(p) == identity and p.shape == shape and p.size() == shape and p.dtype == dtype and p.numel() == numel,
            p.ndim == p.dim() == len(shape) and p.nelement() == numel and len(p) == shape[0],
            isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf and p.is_floating_point(),
            p.device.type == "cpu" and p.element_size() == 8 and p.grad is None,
            p in {p} and name in repr(p) and f"unit '{unit}'" in repr(p) and str(tuple(shape)) in repr(p),
            name in str(p) and name in f"{p}" and name in f"{p!s:>200}",
            torch.empty_like(p).shape == shape and torch.zeros_like(p).dtype == dtype,
        )
        found += [f"{name}: {same}"] if not all(same) else []
    if "Linear(in_features=8, out_features=17" not in repr(model):
        found.append(repr(model))
    torch.optim.SGD(model.parameters(), lr=0.1)
    loop.close()
    return found


def test_a_released_parameter_keeps_identity_shape_and_dtype(pool: Pool) -> None:
    for partition in ("iig", "ggg"):
        for wrong in pool.run(_what_a_released_parameter_tells, partition):
            assert not wrong, wrong


def _uses(model: Stack) -> dict[str, Callable[[], Any]]:
    p = model.blocks[1].a.weight
    x = torch.ones(2, 8, dtype=torch.float64)
    return {
        "add": lambda: p + 1,
        "radd": lambda: 1 + p,
        "in place": lambda: p.add_(1),
        "sum": p.sum,
        "norm": lambda: torch.linalg.vector_norm(p),
        "matmul": lambda: x @ p.t(),
        "linear": lambda: nn.functional.linear(x, p),
        "submodule": lambda: model.blocks[1].a(x),
        "clone": p.clone,
        "detach": p.detach,
        "subclass": lambda: p.as_subclass(torch.Tensor),
        "data": lambda: p.data,
        "item": lambda: p[0, 0].item(),
        "list": p.tolist,
        "numpy": lambda: p.detach().numpy(),
        "index": lambda: p[0],
        "iterate": lambda: list(p),
        "compare": lambda: p == p,
        "copy into": lambda: p.copy_(torch.ones(17, 8)),
        "copy from": lambda: torch.ones(17, 8).copy_(p),
        "fill": lambda: p.fill_(0),
        "initialise": lambda: nn.init.normal_(p),
        "constant": lambda: nn.init.zeros_(p),
        "concatenate": lambda: torch.cat([p, p]),
        "to": lambda: p.to(torch.float32),
        "half": model.half,
        "deepcopy": lambda: copy.deepcopy(model),
        "deepcopy of it": lambda: copy.deepcopy(p),
        "pickle": lambda: pickle.dumps(model),
        "save": lambda: torch.save(model, io.BytesIO()),
        "state_dict": model.state_dict,
        "state_dict of a part": model.blocks[1].a.state_dict,
        "vector": lambda: nn.utils.parameters_to_vector(model.blocks[1].parameters()),
    }


def _misused(partition: str) -> dict[str, str]:
    loop, model, _ = _setup(partition)
    texts = {}
    for name, use in _uses(model).items():
        texts[name] = _message(use)
        with torch.no_grad():
            if texts[name] != (again := _message(use)):
                texts[f"{name} without grad"] = again
    _backward(loop, model, 0)  # nothing of it did harm
    loop.close()
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        texts["afterwards"] = "values are lost"
    return texts


def test_using_a_released_parameter_says_which_it_is_and_what_to_do(pool: Pool) -> None:
    for partition in ("iig", "ggg"):
        for texts in pool.run(_misused, partition):
            for use, text in texts.items():
                pattern = r"parameter '(\S+)' of unit '(\S+)' is released.*HINT:.*full_parameters\(module\)"
                assert re.search(pattern, text), f"{use}: {text}"


# ---- whole values on demand ---------------------------------------------------------------------------------


def _changed_by_hand(loop: Alone) -> nn.Module:
    model = Stack().double()
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        _backward(loop, model, step)
        optimizer.step()
        with loop.full_parameters(model, writeback=True), torch.no_grad():
            if loop.rank == 0:  # its changes win
                model.blocks[0].a.weight.mul_(0.5)
                model.last.bias.data = torch.full((1,), 0.25 * step, dtype=torch.float64)
        with loop.full_parameters(model.blocks[1], writeback=True), torch.no_grad():
            with loop.full_parameters(model), torch.no_grad():
                scale = sum(p.abs().mean() for p in model.parameters())
            model.blocks[1].norm.weight.add_(0.1 * scale)
    return model


def test_changes_inside_full_parameters_are_kept_with_writeback(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _changed_by_hand, few)


def _looked_at(partition: str) -> list[str]:
    loop, model, _ = _setup(partition)
    torch.manual_seed(0)
    expected = values_of(Stack().double())
    with loop.full_parameters(model):
        found = differences(values_of(model), expected, 0.0)
        found += [] if all(type(p) is nn.Parameter for p in model.parameters()) else ["stand-ins inside"]
        clone = copy.deepcopy(model)
        with torch.no_grad():
            model.blocks[0].a.bias.add_(1)  # not to be kept
    with loop.full_parameters(model.blocks[2]):
        whole = [name for name, p in model.named_parameters() if type(p) is nn.Parameter]
        found += [] if all(name.startswith("blocks.2.") for name in whole) and len(whole) == 6 else [str(whole)]
    found += [name for name, p in model.named_parameters() if type(p) is nn.Parameter]
    try:
        with loop.full_parameters(model):
            raise KeyError("inside")
    except KeyError:
        found += [name for name, p in model.named_parameters() if type(p) is nn.Parameter]
    loop.close()
    return found + differences(values_of(model), expected, 0.0) + differences(values_of(clone), expected, 0.0)


def test_full_parameters_show_whole_values_and_only_inside(pool: Pool) -> None:
    for partition in P_PARTITIONED:
        for wrong in pool.run(_looked_at, partition):
            assert not wrong, (partition, wrong[:5])


def _state_inside_full_parameters(partition: str) -> bool:
    loop, model, _ = _setup(partition)
    with loop.full_parameters(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    loop.close()
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_state_dict_can_be_taken_inside_full_parameters(pool: Pool) -> None:
    assert pool.run(_state_inside_full_parameters, "iig") == [True] * WORLD_SIZE


def _foreign_optimizer() -> str:
    loop, model, _ = _setup("iig")
    text = _message(lambda: loop.attach(torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1)), ValueError)
    loop.close()
    return text


def test_an_optimizer_of_other_parameters_is_refused(pool: Pool) -> None:
    for text in pool.run(_foreign_optimizer):
        assert "a tensor of shape (3, 2) is not a parameter of Stack" in text
        assert "HINT: build optimizers in configure_optimizers" in text


def test_the_scenarios_here_do_train() -> None:
    """A loop that does nothing would equal its oracle."""
    torch.manual_seed(0)
    start = values_of(Stack().double())
    for scenario in (_bare_backwards, _cleared_in_every_way, _changed_by_hand):
        assert len(differences(train(scenario, Alone()), start, 1e-3)) > 5
    assert isinstance(share(0, 0), Tensor)
