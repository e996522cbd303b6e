"""SparseMask with masks that change: equal to the same training by hand, with exact counts, and resumed to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.algorithms.supar.dynamic import Rule
from lightning_paro.callbacks import SparseMask, SparsityReport
from lightning_paro.callbacks._dynamic_masks import _is_whole
from lightning_paro.callbacks.sparse_mask import _clear
from lightning_paro.mixins import SuParMixin
from lightning_paro.state_access import Shard
from tests.conformance.lisa_runs import Save, quiet
from tests.distributed.strategies import whole_values
from tests.distributed.supar import BASE, LAYERS, LR, Net, Plain, batches, train
from tests.distributed.test_dynamic_masks import (
    DENSITY,
    DROP,
    EVERY,
    STEPS,
    Constant,
    PlainConstant,
    assert_close,
    by_hand,
    dynamic,
)

SPARSE = [f"layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in ("up", "down")]


pytestmark = pytest.mark.usefixtures("one_thread")  # sums are to be the same each time


class Masks(Callback):
    """After every step: the masks, and whether what they do not keep is zero, and has moments of zero."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.is_zero = True

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == len(self.seen):
            return
        state = module.state_dict()
        self.seen.append({name: state[f"{name}_mask"] for name in SPARSE if f"{name}_mask" in state})
        for name, mask in self.seen[-1].items():
            parameter = module.get_parameter(name)
            moments = trainer.optimizers[0].state[parameter]
            tensors = (parameter, moments["exp_avg"], moments["exp_avg_sq"])
            self.is_zero &= not any(tensor[~mask].any() for tensor in tensors)


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rigl", "gmp"])
def test_training_equals_that_by_hand(rule: Rule) -> None:
    _, module = train(callbacks=[dynamic(rule)], build=Net if rule == "rigl" else Plain, steps=STEPS)
    truth, masks = by_hand(rule)
    assert_close(whole_values(module), truth)
    for name, mask in masks.items():
        assert torch.equal(module.state_dict()[f"{name}_mask"], mask), name


def test_rigl_without_a_plan_moves_as_many_as_the_schedule_says() -> None:
    masks = Masks()
    train(build=Plain, callbacks=[SparseMask(DENSITY, dynamic="rigl", every=EVERY, drop_fraction=DROP), masks], steps=9)
    assert masks.is_zero
    end, moved = 6, []
    for step, (before, after) in enumerate(zip(masks.seen, masks.seen[1:], strict=False), start=1):
        for name, mask in after.items():
            assert int(mask.sum()) == round(DENSITY * mask.numel())
            gone = int((before[name] & ~mask).sum())
            if step % EVERY or step > end:
                assert not gone
            else:
                assert gone <= round(DROP / 2 * (1 + math.cos(math.pi * step / end)) * int(mask.sum()))
                moved.append(gone)
    assert sum(moved) > 0


def test_pruned_counts_follow_the_cube_and_reach_the_density() -> None:
    masks = Masks()
    _, module = train(
        build=Plain, callbacks=[SparseMask(0.3, dynamic="gmp", every=2, until=1, exclude=("down",)), masks], steps=8
    )
    assert masks.is_zero
    for step, seen in enumerate(masks.seen):
        done = min(step // 2 * 2 / 6, 1)  # the last change is before the last step
        assert list(seen) == [name for name in SPARSE if "up" in name]
        for name, mask in seen.items():
            assert int(mask.sum()) == round((0.3 + 0.7 * (1 - done) ** 3) * mask.numel()), (step, name)
    assert all(module.get_parameter(name).all() for name in SPARSE if "down" in name)


def test_a_plan_of_a_dense_model_is_pruned() -> None:
    mask = SparseMask(DENSITY, dynamic="gmp", every=2)
    _, module = train(build=lambda: Net(density=1.0), callbacks=[mask], steps=STEPS)
    for name in SPARSE:
        assert int(module.get_parameter(name).count_nonzero()) == round(DENSITY * module.get_parameter(name).numel())


class Late(SuParMixin, Plain):
    """Has its plan when the strategy is there."""

    def configure_model(self) -> None:
        if self.supar_plan is None:
            self.supar_setup(SuParPlan.from_model(self, base_width=BASE, density=0.5, init_std=0.3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(LR))


@pytest.mark.parametrize("options", [{}, {"dynamic": "rigl", "every": 2}])
def test_masks_of_a_plan_that_comes_late(options: dict[str, Any]) -> None:
    _, module = train(build=Late, callbacks=[SparseMask(**options)], precision="32-true")
    for name in SPARSE:
        assert torch.equal(module.get_parameter(name) != 0, module.state_dict()[f"{name}_mask"])


def test_weights_that_were_just_dropped_do_not_come_back_with_an_optimizer_that_moves_all() -> None:
    class Stirring(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01)
            return loss

    class Stirred(Plain):
        def configure_optimizers(self) -> Any:
            return Stirring(self.parameters(), lr=0.1)

    _, module = train(build=Stirred, callbacks=[SparseMask(0.5, dynamic="rigl", every=2)], steps=STEPS)
    for name in SPARSE:
        assert not module.get_parameter(name)[~module.state_dict()[f"{name}_mask"]].any()


# ---- checkpoints and reports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4, 7])
@pytest.mark.parametrize("rule", ["rigl", "gmp"])
def test_resumed_training_is_the_same_to_the_bit(rule: Rule, at: int, tmp_path: Path) -> None:
    """Before a change, right before one, and after the last."""
    settings: dict[str, Any] = {"build": Constant if rule == "rigl" else PlainConstant, "steps": STEPS}
    settings["accumulate"] = 1
    settings["precision"] = "32-true"  # Lightning rounds the moments of float64 on their way back
    _, whole = train(callbacks=[dynamic(rule), Save(tmp_path / "a.ckpt", at)], **settings)
    _, resumed = train(callbacks=[dynamic(rule)], resume=tmp_path / "a.ckpt", **settings)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_loading_what_was_saved_before_a_change_takes_it_back() -> None:
    """As tuners do after their trial."""
    mask, module = SparseMask(0.5, dynamic="rigl"), Plain()
    mask.setup(quiet(), module, "fit")
    assert mask.masks is not None
    before = module.state_dict()
    mask.masks.replace(SPARSE[0], before[f"{SPARSE[0]}_mask"].roll(1))
    assert not torch.equal(module.state_dict()[f"{SPARSE[0]}_mask"], before[f"{SPARSE[0]}_mask"])
    module.load_state_dict(before)
    assert torch.equal(module.state_dict()[f"{SPARSE[0]}_mask"], before[f"{SPARSE[0]}_mask"])


def test_masks_that_keep_less_than_pruning_leaves_are_refused(tmp_path: Path) -> None:
    _, module = train(build=Plain, callbacks=[SparseMask(0.2, dynamic="gmp", every=1)])
    mask = SparseMask(0.4, dynamic="gmp", every=1)
    other = Plain()
    mask.setup(quiet(), other, "fit")
    with pytest.raises(RuntimeError, match="keeps 0.2 of the weights, the plan says 0.4"):
        other.load_state_dict(module.state_dict())


def test_a_report_shows_the_masks_of_the_moment() -> None:
    report = SparsityReport()
    shares: list[float] = []

    class First(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            shares.append(report.rows[0]["density"])

    train(build=Plain, callbacks=[SparseMask(0.3, dynamic="gmp", every=1), report, First()])
    assert shares[0] == 1
    assert report.rows[0]["density"] == report.rows[0]["nonzero"] == pytest.approx(0.3)


# ---- what is said and refused ---------------------------------------------------------------------------------------


def test_it_warns_that_nothing_carries_over(recwarn: pytest.WarningsRecorder) -> None:
    train(build=Plain, callbacks=[SparseMask(0.5, dynamic="gmp", every=1)])
    told = [str(warning.message) for warning in recwarn if "SparseMask" in str(warning.message)]
    assert len(told) == 1
    assert "'gmp'): hyperparameters do not carry over to masks that follow magnitudes" in told[0]
    assert "HINT: static masks, or tune at this density." in told[0]


def test_it_warns_where_no_mask_ever_changes() -> None:
    with pytest.warns(UserWarning, match="never changes a mask: every=100 steps, but masks stay after 3 of 5. HINT"):
        train(build=Plain, callbacks=[SparseMask(0.5, dynamic="rigl")])


def test_static_masks_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    train(build=Plain, callbacks=[SparseMask(0.5)])
    assert not [warning for warning in recwarn if "SparseMask" in str(warning.message)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": "set"}, "dynamic='set' is none of rigl, gmp. HINT"),
        ({"dynamic": "rigl", "every": 0}, "every=0 must be a whole number of steps, 1 or more"),
        ({"dynamic": "rigl", "every": 2.0}, "every=2.0 must be"),
        ({"dynamic": "rigl", "drop_fraction": 1.5}, "drop_fraction=1.5 must be a share, above 0 and at most 1"),
        ({"dynamic": "gmp", "until": 0}, "until=0 must be a share"),
        ({"dynamic": "rigl", "kind": "nm"}, "kind='nm' with dynamic='rigl', which moves weights one by one; expected"),
        ({"dynamic": "gmp", "kind": "bernoulli"}, "kind='bernoulli' with dynamic='gmp', which begins dense"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMask(0.5, **options)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (Plain, {"dynamic": "rigl"}, "SparseMask.. has no density, and the module no plan. HINT"),
        (lambda: Net(density=1.0), {"dynamic": "gmp"}, "has no density, and the module a dense plan. HINT"),
        (Net, {"density": 0.3, "dynamic": "rigl"}, "Net has the masks of its plan, and SparseMask has arguments for"),
        (Net, {"dynamic": "gmp"}, "Net has a plan with masks.* HINT: .*SparseMask.density=0.5, dynamic='gmp'.; or"),
        (Late, {"dynamic": "gmp"}, "Late has a plan with masks"),
    ],
)
def test_what_is_refused(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(build=build, callbacks=[SparseMask(**options)], precision="32-true")


def test_masks_of_a_plan_that_have_a_pattern_are_refused() -> None:
    model = Net()
    plan = SuParPlan.from_model(model, base_width=BASE, density=1)
    mask = SparseMask(dynamic="rigl")
    assert mask._dynamic is not None
    with pytest.raises(ValueError, match="kind='block' with dynamic='rigl'"):
        mask._dynamic.check_plan("Net", type(plan.masks)("block", 0.5))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from batches(2)


@pytest.mark.parametrize("settings", [{"max_epochs": -1}, {"max_epochs": 1}], ids=str)
def test_training_without_an_end_is_refused(settings: dict[str, Any]) -> None:
    trainer = quiet(callbacks=[SparseMask(0.5, dynamic="rigl")], **settings)
    with pytest.raises(ValueError, match="until 0.75 of the training's steps, and this training has no end .* HINT"):
        trainer.fit(Plain(), DataLoader(Endless(), batch_size=None))


def test_several_optimizers_are_refused() -> None:
    class Two(Plain):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers, self.head)]

    with pytest.raises(ValueError, match="dynamic='rigl' with 2 optimizers; expected one.* HINT: static masks"):
        train(build=Two, callbacks=[SparseMask(0.5, dynamic="rigl")], gradient_clip_val=None, accumulate=1)


def test_parts_that_do_not_follow_each_other_are_found() -> None:
    assert _is_whole({(0, 4), (4, 3)}, 7)
    assert not _is_whole({(0, 4), (4, 2)}, 7)
    assert not _is_whole({(0, 4), (2, 4)}, 8)  # columns: the second begins within the first row
    assert not _is_whole(set(), 7)


def test_moments_of_a_single_weight_are_cleared() -> None:
    """A rank may hold one weight of a tensor; the count of steps beside its moments has another shape."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(1)}
    shard = Shard(torch.ones(1), None, state, 2, torch.Size((2, 2)), 1)
    _clear(shard, torch.tensor([True]), is_elementwise=True)
    assert (shard.value.item(), state["exp_avg"].item(), state["step"].item()) == (0, 0, 3)
