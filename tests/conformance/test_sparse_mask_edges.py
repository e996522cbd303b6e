"""SparseMask where trainings are unusual: optimized by hand, by what mixes elements, or only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.callbacks import SparseMask
from lightning_paro.mixins import SuParMixin
from tests.distributed.supar import BASE, LR, Net, Plain, batches, loss_of, train


def alive(module: nn.Module) -> list[str]:
    """Names of what is masked and not zero all the same."""
    state = module.state_dict()
    masks = {name.removesuffix("_mask"): mask for name, mask in state.items() if name.endswith("_mask")}
    assert masks
    return [name for name, mask in masks.items() if state[name][~mask].any()]


# ---- optimization by hand ------------------------------------------------------------------------------------------


class Manual(Plain):
    """Clips what it has got by backward."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(100 * loss_of(self, batch))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_clipping_by_hand_does_not_count_what_is_masked() -> None:
    _, module = train(
        build=Manual, callbacks=[SparseMask(0.1)], steps=4, accumulate=1, gradient_clip_val=None, precision="64-true"
    )
    masks = {name: mask for name, mask in module.state_dict().items() if name.endswith("_mask")}
    seed_everything(0, verbose=False)
    plain = Plain().double()
    with torch.no_grad():
        for name, mask in masks.items():
            plain.get_parameter(name.removesuffix("_mask")).mul_(mask)
    for batch in batches(4):
        plain.zero_grad()
        (100 * loss_of(plain, batch)).backward()
        for name, mask in masks.items():
            plain.get_parameter(name.removesuffix("_mask")).grad.mul_(mask)  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= parameter.grad  # type: ignore[operator]
    for name, value in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value, rtol=0, atol=1e-12)


# ---- optimizers that mix elements ----------------------------------------------------------------------------------


class Mixed(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.layers.parameters() if p.ndim == 2], lr=0.02)


class TwoSteps(Mixed):
    automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        for _ in range(2):
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            assert not alive(self)
            self.manual_backward(loss_of(self, batch))
            optimizer.step()


def test_masked_weights_are_zero_right_after_a_step_that_mixes() -> None:
    _, module = train(
        build=TwoSteps, callbacks=[SparseMask(0.25)], steps=4, accumulate=1, gradient_clip_val=None, precision="32-true"
    )
    assert not alive(module)


def test_averages_that_are_made_before_are_of_masked_weights() -> None:
    averages = EMAWeightAveraging(decay=0.5)
    _, module = train(build=Mixed, callbacks=[averages, SparseMask(0.25)], precision="32-true")
    assert not alive(module)


def test_nothing_stays_at_an_optimizer() -> None:
    trainer, _ = train(build=Mixed, callbacks=[SparseMask(0.25)], steps=1, precision="32-true")
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


# ---- what is not trained -------------------------------------------------------------------------------------------


class HeadOnly(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=LR)


def test_what_no_optimizer_holds_is_masked() -> None:
    _, module = train(build=HeadOnly, callbacks=[SparseMask(0.25)], precision="32-true")
    assert not alive(module)


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


class Trained(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LR)


def test_pruning_takes_in_what_is_unfrozen() -> None:
    mask = SparseMask(0.25, dynamic="gmp", every=2)
    with pytest.warns(UserWarning, match="hyperparameters do not carry over"):
        _, module = train(
            build=Trained, callbacks=[Thaw(), mask], steps=24, max_epochs=6, accumulate=1, limit_train_batches=4,
            precision="32-true",
        )  # fmt: skip
    shares = {name: mask.double().mean().item() for name, mask in module.state_dict().items() if "_mask" in name}
    assert shares == pytest.approx(dict.fromkeys(shares, 0.25), abs=0.003)
    assert len(shares) == 6
    assert not alive(module)


class Planned(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(LR))


def test_what_is_unfrozen_into_a_group_without_the_plans_factor_is_refused() -> None:
    with pytest.raises(ValueError, match="'layers.0.down.weight' is in a param group of lr=0.001 without the plan's"):
        train(
            build=Planned, callbacks=[Thaw()], steps=6, max_epochs=3, accumulate=1, limit_train_batches=2,
            precision="32-true",
        )  # fmt: skip


class Half(Net):
    """The rest of the plan is in a group of the user's."""

    def configure_optimizers(self) -> Any:
        first, *others = self.supar_param_groups(LR)
        return torch.optim.AdamW([first, {"params": [p for group in others for p in group["params"]], "lr": LR}])


def test_groups_of_the_users_with_what_the_plan_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="without the plan's factor.*HINT: groups of supar_param_groups"):
        train(build=Half)


# ---- modules that have other things ----------------------------------------------------------------------------------


class Rows(Plain):
    """With a matrix that no module multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(4, 10))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Late(SuParMixin, Rows):
    """A dense plan that knows of it, made in configure_model."""

    def configure_model(self) -> None:
        told = {"places": {"role": "embedding"}}
        self.supar_setup(SuParPlan.from_model(self, base_width=BASE, overrides=told))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(LR))


def test_a_matrix_without_a_role_stays_dense() -> None:
    _, module = train(build=Rows, callbacks=[SparseMask(0.25)], precision="32-true")
    assert not alive(module)
    assert not any("places" in name and "_mask" in name for name in module.state_dict())


def test_a_dense_plan_of_configure_model_may_have_been_told_of_roles() -> None:
    _, module = train(build=Late, precision="32-true", steps=1)
    assert module.supar_plan["places"].role == "embedding"  # type: ignore[index, union-attr]
    with pytest.warns(UserWarning, match="hyperparameters do not carry over"):
        _, module = train(
            build=Late, callbacks=[SparseMask(0.25, dynamic="gmp", every=2)], precision="32-true", steps=8
        )
    assert not alive(module)


class DensePlan(Net):
    def __init__(self) -> None:
        super().__init__(density=1.0)


def test_static_masks_beside_a_dense_plan_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="DensePlan has a dense plan.*HINT: SuParPlan.from_model"):
        train(build=DensePlan, callbacks=[SparseMask(0.25)], steps=1)


class OwnMask(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up.register_buffer("weight_mask", torch.ones(21, 10))


def test_a_buffer_of_the_modules_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="OwnMask has 'layers.0.up.weight_mask' already.*HINT: another name"):
        train(build=OwnMask, callbacks=[SparseMask(0.5)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_masks_that_were_cast_with_a_state_dict(dtype: torch.dtype) -> None:
    module, other = Net(), Net(seed=3)
    state = {name: v.to(dtype) if v.dtype is torch.bool else v.bfloat16() for name, v in other.state_dict().items()}
    module.load_state_dict(state)
    assert all(torch.equal(mask, module.state_dict()[n]) for n, mask in other.state_dict().items() if "_mask" in n)
    train(build=lambda: module, precision="32-true", steps=1)
    state["layers.0.up.weight_mask"] = state["layers.0.up.weight_mask"].float() + 0.5
    with pytest.raises(RuntimeError, match="other numbers than 0 and 1"):
        module.load_state_dict(state)


class Noted(CSVLogger):
    noted: Any = None

    def log_hyperparams(self, params: Any = None) -> None:
        self.noted = params


class Saving(SuParMixin, Plain):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.supar_setup(SuParPlan.from_model(self, base_width=BASE, density=0.5))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(LR))


def test_loggers_are_given_the_digest_also_where_hparams_were_saved_before(tmp_path: Any) -> None:
    logger = Noted(tmp_path)
    _, module = train(build=Saving, precision="32-true", steps=1, logger=logger)
    assert logger.noted == {"width": 3, "supar_plan": module.supar_plan.digest}  # type: ignore[union-attr]


# ---- processes that end ----------------------------------------------------------------------------------------------


def test_dynamic_masks_that_would_be_lost_with_a_process_are_refused() -> None:
    with pytest.raises(Exception, match="lost when processes that were spawned or forked end"):
        train(
            "ddp_fork", 1, build=Plain, callbacks=[SparseMask(0.5, dynamic="rigl", every=2)], precision="32-true",
            steps=4,
        )  # fmt: skip
