"""Parameters that not every rank, not every step, or not every phase of training uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.loops import (
    ALL,
    P_WHOLE,
    Alone,
    Block,
    Sharded,
    Stack,
    accumulate,
    adamw,
    assert_as_alone,
    share,
)
from tests.distributed.pool import Pool


class Branching(Block):
    """A block with a branch that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(3))  # smaller than the number of ranks

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = super().forward(x)
        return x + self.branch(x) * self.gain.prod() if branch else x


class Selective(Stack):
    """Runs some of its blocks, and the branches of some of those."""

    def __init__(self) -> None:
        super().__init__(*(Branching() for _ in range(3)))
        self.double()

    def forward(self, x: Tensor, blocks: tuple[int, ...] = (0, 1, 2), branches: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.first(x)
        for index in blocks:
            x = self.blocks[index](x, branch=index in branches)
        return self.last(x)


def _branches_differ_by_rank(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            with loop.step():

                def loss(rank: int, step: int = step, micro: int = micro) -> Tensor:
                    used = {0: (0,), 1: (0, 1), 2: (), 3: (1,) if step % 2 else (2,)}[rank]
                    return model(share(step, rank, micro), branches=used if micro else ()).square().mean() / 2

                mean = loop.mean(loss)
            loop.backward(mean, sync=micro == 1)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


def test_parameters_unused_on_some_ranks_inside_units_that_all_run(pool: Pool, some: tuple[str, ...]) -> None:
    assert_as_alone(pool, _branches_differ_by_rank, some)


def _blocks_differ_by_rank(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    blocks = [(0,), (2, 0), (1, 2), (2, 1, 0)]
    for step in range(3):
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank), blocks[(rank + s) % 4]).square().mean())
        loop.backward(mean)
        optimizer.step()
    return model


def test_whole_blocks_unused_on_some_ranks_where_parameters_are_whole(pool: Pool) -> None:
    assert_as_alone(pool, _blocks_differ_by_rank, P_WHOLE)


def _unused_everywhere_in_some_steps(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    plans = [((0, 1), (1,)), ((0, 1, 2), (2,)), ((0, 2), ()), ((1,), (1,)), ((0, 1, 2), (0, 1, 2))]
    for step, (blocks, branches) in enumerate(plans):
        optimizer.zero_grad(set_to_none=True)
        with loop.step():
            mean = loop.mean(lambda rank, s=step, b=blocks, c=branches: model(share(s, rank), b, c).square().mean())
        loop.backward(mean)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


def test_parameters_unused_on_all_ranks_are_not_decayed(pool: Pool, few: tuple[str, ...]) -> None:
    """Their gradient is None in one process: AdamW neither moves them nor counts a step of theirs."""
    assert_as_alone(pool, _unused_everywhere_in_some_steps, few)


def _zeroed_not_forgotten(loop: Alone) -> nn.Module:
    """With set_to_none=False a parameter that was used once has a zero gradient in later steps, and decays."""
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    for step, blocks in enumerate([(0, 1), (1,), (2,), (1, 2)]):
        optimizer.zero_grad(set_to_none=False)
        with loop.step():
            mean = loop.mean(lambda rank, s=step, b=blocks: model(share(s, rank), b).square().mean())
        loop.backward(mean)
        optimizer.step()
    return model


def test_gradients_set_to_zero_decay_parameters_as_in_one_process(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _zeroed_not_forgotten, few)


def _zeroed_in_mid_window(loop: Alone) -> nn.Module:
    """The first micro-batch alone uses a branch; its gradient is zero by the step, and not None."""
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    for micro, branches in enumerate([(0,), ()]):
        with loop.step():
            mean = loop.mean(lambda rank, m=micro, b=branches: model(share(0, rank, m), branches=b).square().mean())
        loop.backward(mean, sync=micro == 1)
        if micro == 0:
            optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    return model


def test_gradients_set_to_zero_between_micro_batches_are_not_forgotten(pool: Pool) -> None:
    assert_as_alone(pool, _zeroed_in_mid_window, ALL)


def _requires_grad_toggled(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    frozen: list[list[nn.Module]] = [[], [model.blocks[0], model.last], [model.blocks[1].a], [model.first], []]
    for step, modules in enumerate(frozen):
        for module in modules:
            module.requires_grad_(False)
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
        for module in modules:
            module.requires_grad_(True)
    return model


def test_requires_grad_toggled_between_steps(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _requires_grad_toggled, few)


def _toggled_within_an_accumulation_window(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(3):
            model.blocks[micro].requires_grad_(False)
            with loop.step():
                mean = loop.mean(lambda rank, s=step, m=micro: model(share(s, rank, m)).square().mean() / 3)
            loop.backward(mean, sync=micro == 2)
            model.blocks[micro].requires_grad_(True)
        optimizer.step()
    return model


def test_requires_grad_toggled_within_an_accumulation_window(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _toggled_within_an_accumulation_window, few)


def _frozen_at_setup_then_added(loop: Alone) -> nn.Module:
    model = Selective()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].a.requires_grad_(False)
    loop.shard(model)
    optimizer = loop.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6))
    for step in range(5):
        if step == 2:
            model.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 3e-2})
        if step == 3:
            model.blocks[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[1].a.parameters()), "weight_decay": 0.0})
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        loop.clip(optimizer, 0.5)
        optimizer.step()
    return model


def test_parameters_frozen_at_setup_and_added_to_the_optimizer_later(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _frozen_at_setup_then_added, few)


def _frozen_at_setup_but_in_the_optimizer(loop: Alone) -> nn.Module:
    model = Selective()
    model.blocks[1].requires_grad_(False)
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(4):
        model.blocks[1].requires_grad_(step >= 2)
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
    return model


def test_parameters_frozen_at_setup_that_the_optimizer_held_all_along(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _frozen_at_setup_but_in_the_optimizer, few)


def _param_groups_and_scheduler(loop: Alone) -> nn.Module:
    model = loop.shard(Selective())
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = loop.attach(
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}],
            lr=1e-2,
            eps=1e-6,
        )
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 1e-2], total_steps=6)
    for step in range(4):
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        loop.clip(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
    return model


def test_param_groups_of_their_own_settings_and_a_scheduler(pool: Pool, few: tuple[str, ...]) -> None:
    assert_as_alone(pool, _param_groups_and_scheduler, few)


def _validation_between_steps(loop: Alone, whole: bool) -> nn.Module:
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
        model.eval()
        with loop.evaluation(whole), torch.no_grad():
            for rank in loop.ranks():
                outputs = [model(share(9, 0), blocks=(0, 2)) for _ in range(1 + rank * rank)]
            seen.append(outputs[-1])
        model.train()
    model.register_buffer("seen", torch.stack(seen))
    return model


def _validation_with_whole_units(loop: Alone) -> nn.Module:
    return _validation_between_steps(loop, whole=True)


def _validation_with_joint_gathers(loop: Alone) -> nn.Module:
    return _validation_between_steps(loop, whole=False)


@pytest.mark.parametrize("scenario", [_validation_with_whole_units, _validation_with_joint_gathers])
def test_ranks_may_run_different_numbers_of_forwards_in_evaluation(
    pool: Pool, few: tuple[str, ...], scenario: object
) -> None:
    assert_as_alone(pool, scenario, few)  # type: ignore[arg-type]


def _train_on_path(loop: Sharded, model: nn.Module, path: tuple[int, ...]) -> None:
    for is_last in (False, True):  # what a window begins with is noticed as well
        with loop.step():
            loss = model(share(8, loop.rank), path).mean()
        loop.backward(loss, sync=is_last)


def _paths_that_differ(loop: Alone, paths: list[tuple[int, ...]]) -> nn.Module:
    """A step in which ranks run blocks in their own ways is refused on all ranks; training goes on from there."""
    model = loop.shard(Selective())
    optimizer = loop.attach(adamw(model))
    for step in range(2):
        if isinstance(loop, Sharded):
            with pytest.raises(RuntimeError, match="every rank must run the same units in the same order") as caught:
                _train_on_path(loop, model, paths[loop.rank])
            if step == 0:  # later it is noticed where a rank leaves the path of the step before
                for line in _DIFFERENT[tuple(paths)]:
                    assert line in str(caught.value), str(caught.value)
            assert "HINT: make the choice of layers the same on all ranks" in str(caught.value)
            loop.engine.abort()
        optimizer.zero_grad()
        with loop.step():
            mean = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(mean)
        optimizer.step()
    return model


_BY_RANK = [(0, 1), (1, 0), (0, 1), (1, 0)]
_BY_GROUP = [(0, 1), (0, 1), (1, 2), (1, 2)]
_DIFFERENT = {
    tuple(_BY_RANK): ["the same units in another order"],
    tuple(_BY_GROUP): [
        "unit 'blocks.0': 1 times on ranks 0, 1; 0 times on ranks 2, 3",
        "unit 'blocks.2': 0 times on ranks 0, 1; 1 times on ranks 2, 3",
    ],
}


def _paths_by_rank(loop: Alone) -> nn.Module:
    return _paths_that_differ(loop, _BY_RANK)


def _paths_by_group(loop: Alone) -> nn.Module:
    return _paths_that_differ(loop, _BY_GROUP)


@pytest.mark.parametrize("scenario", [_paths_by_rank, _paths_by_group])
def test_ranks_that_run_other_units_say_which_and_train_on(pool: Pool, scenario: object) -> None:
    assert_as_alone(pool, scenario, ("ini", "iig", "igg"))  # type: ignore[arg-type]


class Viewed(nn.Module):
    """Frozen blocks whose outputs are views, which the caller changes in place: their values are needed in backward."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6, dtype=torch.float64).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(-1, 6)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x.mul_(2)
        return x


def _views_changed_in_place(loop: Alone) -> nn.Module:
    model = loop.shard(Viewed())
    accumulate(loop, model, loop.attach(adamw(model.first)), steps=2, micro_batches=1)
    return model


def _gradients_taken_off(loop: Alone) -> nn.Module:
    """As DINO does with those of the last layer in its first epoch."""
    torch.manual_seed(0)
    model = Stack(Block(8), Block(8), Block(8)).double()
    taken = list(model.parameters())[::2]
    loop.shard(model)
    optimizer = loop.attach(adamw(model))
    for step in range(3):
        optimizer.zero_grad()
        with loop.step():
            loss = loop.mean(lambda rank, s=step: model(share(s, rank)).square().mean())
        loop.backward(loss)
        if step < 2:
            for parameter in taken:
                parameter.grad = None
        loop.clip(optimizer, 0.1)
        optimizer.step()
    return model


@pytest.mark.parametrize("scenario", [_views_changed_in_place, _gradients_taken_off])
def test_values_are_there_and_gradients_are_not_as_in_one_process(
    pool: Pool, few: tuple[str, ...], scenario: Any
) -> None:
    assert_as_alone(pool, scenario, few)
