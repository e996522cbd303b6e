"""SuParMixin in a LightningModule: set up once, grouped, saved, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_paro.algorithms.supar import SuParPlan
from lightning_paro.algorithms.supar.scales import hooks_of
from lightning_paro.callbacks import ParamGroupGuard, SparseMask, SparsityReport
from lightning_paro.mixins import SuParMixin
from tests.distributed.supar import BASE, DECAY, LR, WIDTH, Layer, Net, Plain, train


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.outward = nn.Linear(WIDTH, 11)


class Outer(SuParMixin, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.extra = nn.Linear(3, 3)


def plan_of(model: nn.Module, **options: Any) -> SuParPlan:
    return SuParPlan.from_model(model, **{"base_width": BASE, "density": 0.5, "seed": 1, **options})


# ---- set-up ---------------------------------------------------------------------------------------------------------


def test_values_are_drawn_from_seed_and_name() -> None:
    torch.manual_seed(1)
    one = Net()
    before = torch.get_rng_state()
    one.supar_setup(one.supar_plan)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    for other, same in ((Net(), True), (Net(seed=2), False)):
        equal = [torch.equal(p, other.get_parameter(name)) for name, p in one.named_parameters() if p.ndim > 1]
        assert all(equal) if same else not any(equal)
    for name, parameter in one.named_parameters():
        entry = one.supar_plan[name]  # type: ignore[index]
        if entry.role == "vector":
            assert (parameter == (0 if name.endswith("bias") else 1)).all()
        else:
            kept = parameter.detach()[parameter != 0]
            assert kept.numel() / parameter.numel() == pytest.approx(entry.rho)
            assert kept.std() == pytest.approx(entry.init_std, rel=5 / (2 * kept.numel()) ** 0.5)


def test_a_second_set_up_keeps_what_was_trained() -> None:
    _, module = train()
    trained = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.supar_setup(plan_of(module, init_std=0.3, alpha_input=2.0))  # type: ignore[operator]
    assert all(torch.equal(value, module.get_parameter(name)) for name, value in trained.items())
    with pytest.raises(
        ValueError, match="with another plan: masks .*0.5.* there, .*0.25.* here. HINT: one plan a module"
    ):
        module.supar_setup(plan_of(module, density=0.25, init_std=0.3, alpha_input=2.0))  # type: ignore[operator]


def test_a_plan_of_a_part() -> None:
    module = Outer()
    extra = module.extra.weight.detach().clone()
    plan = plan_of(module.model)
    module.supar_setup(plan)
    assert torch.equal(module.extra.weight, extra)
    assert (module.model.layers[0].up.weight == 0).float().mean() == pytest.approx(0.5, abs=0.01)
    assert "model.layers.0.up.weight_mask" in module.state_dict()
    groups = {id(p): group for group in module.supar_param_groups(1.0, 0.1) for p in group["params"]}
    assert groups[id(module.extra.weight)]["lr"] == 1
    assert groups[id(module.model.layers[0].up.weight)]["lr"] == plan["layers.0.up.weight"].lr_factor


def test_what_cannot_be_set_up() -> None:
    with pytest.raises(ValueError, match="the plan has 'inward.weight', which Net has not. HINT: make the plan"):
        Net.supar_setup(_without_plan(), plan_of(Inner()))
    with torch.device("meta"):
        module = Outer()
    with pytest.raises(ValueError, match="'model.inward.weight' is on the meta device.* HINT: call supar_setup in"):
        module.supar_setup(plan_of(module.model))
    with pytest.raises(RuntimeError, match="there is no plan yet. HINT: call supar_setup"):
        Outer().supar_param_groups(0.1)

    class Alone(SuParMixin):
        pass

    with pytest.raises(TypeError, match="Alone is no LightningModule. HINT"):
        Alone().supar_setup(plan_of(Inner()))


def _without_plan() -> Net:
    module = Net()
    module.supar_plan = None
    return module


# ---- param groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("mode", ["invariant", "paper"])
def test_param_groups(mode: Any, optimizer: Any) -> None:
    module = Net()
    module.layers[2].up.weight.requires_grad_(False)
    plan = module.supar_plan
    assert plan is not None
    groups = module.supar_param_groups(LR, DECAY, mode, optimizer)
    names = {id(p): name for name, p in module.named_parameters()}
    found = {names[id(p)]: group for group in groups for p in group["params"]}
    assert found.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    for name, group in found.items():
        entry = plan[name]
        factor = entry.lr_factor if optimizer == "adamw" else entry.sgd_lr_factor
        assert group["lr"] == pytest.approx(LR * factor)
        if entry.role == "vector":
            assert group["weight_decay"] == 0
        elif mode == "paper":
            assert group["weight_decay"] == DECAY
        else:
            assert group["weight_decay"] * group["lr"] == pytest.approx(DECAY * LR)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr=-1 must be a number, 0 or more"),
        ({"lr": "fast"}, "lr='fast' must be a number"),
        ({"lr": 1, "weight_decay": True}, "weight_decay=True must be a number"),
        ({"lr": 1, "mode": "free"}, "mode='free', optimizer='adamw': expected 'invariant' or 'paper'"),
        ({"lr": 1, "optimizer": "lion"}, "optimizer='lion': expected .*'adamw' or 'sgd'. HINT: the factors of other"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Net().supar_param_groups(**arguments)


# ---- callbacks ------------------------------------------------------------------------------------------------------


def _kinds(trainer: Any) -> list[str]:
    return sorted(type(c).__name__ for c in trainer.callbacks if isinstance(c, (SparseMask, ParamGroupGuard)))


def test_the_module_brings_its_callbacks_unless_they_are_there() -> None:
    trainer, module = train(steps=1)
    assert _kinds(trainer) == ["ParamGroupGuard", "SparseMask"]
    trainer.fit_loop.epoch_loop.max_steps = 2
    assert _kinds(trainer) == ["ParamGroupGuard", "SparseMask"]
    mine = SparseMask()
    trainer, _ = train(steps=1, callbacks=[mine, ParamGroupGuard()])
    assert _kinds(trainer) == ["ParamGroupGuard", "SparseMask"]
    assert mine in trainer.callbacks  # type: ignore[attr-defined]
    trainer, _ = train(steps=1, build=lambda: Net(density=1.0))
    assert _kinds(trainer) == ["ParamGroupGuard"]


def test_masks_that_nobody_keeps_are_refused() -> None:
    class Forgetful(Net):
        def configure_callbacks(self) -> Any:
            return []

    with pytest.raises(
        RuntimeError, match="no SparseMask keeps them: .* HINT: configure_callbacks of the module is to"
    ):
        train(build=Forgetful)
    train(build=Forgetful, callbacks=[SparseMask()], steps=1)


def test_rows_for_padding_stay_zero() -> None:
    module = Outer()
    module.model.inward = nn.Embedding(11, WIDTH, padding_idx=3)
    module.supar_setup(plan_of(module.model))
    assert (module.model.inward.weight == 0).all(1).tolist() == [row == 3 for row in range(11)]


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class Kept(Net):
    def __init__(self, density: float = 0.5) -> None:
        super().__init__(density)
        self.save_hyperparameters()


def test_a_checkpoint_is_loaded_without_a_trainer(tmp_path: Path) -> None:
    trainer, module = train(build=Kept, precision="32-true")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Kept.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert loaded.supar_plan == module.supar_plan
    for key, value in module.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in module.named_parameters()}
    tokens = torch.arange(11)[None]
    assert torch.equal(loaded(tokens), module(tokens))


def test_loggers_get_the_digest_and_checkpoints_the_plan(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer, module = train(build=Kept, precision="32-true", logger=logger, steps=1)
    plan = module.supar_plan
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text()) == {"density": 0.5, "supar_plan": plan.digest}  # type: ignore[union-attr]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert SuParPlan.from_dict(saved["supar_plan"]) == plan
    assert saved["hyper_parameters"] == {"density": 0.5}  # which is what builds it again


def test_a_loaded_mask_wins_over_the_seeds(tmp_path: Path) -> None:
    module = Net()
    state = module.state_dict()
    name = "layers.1.up.weight"
    state[f"{name}_mask"] = ~state[f"{name}_mask"]  # as many, since the density is a half
    module.load_state_dict(state)
    assert torch.equal(module.state_dict()[f"{name}_mask"], state[f"{name}_mask"])
    _, module = train(build=lambda: module)
    assert torch.equal(module.state_dict()[f"{name}_mask"], state[f"{name}_mask"])
    assert not (module.get_parameter(name) * ~state[f"{name}_mask"]).any()
    assert module.get_parameter(name).any()


def test_masks_that_do_not_fit_are_refused() -> None:
    module = Net()
    state = module.state_dict()
    state["layers.1.up.weight_mask"] = torch.ones(2, 2, dtype=torch.bool)
    state["layers.0.up.weight_mask"] = torch.ones(21, 10, dtype=torch.bool)
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state)
    assert "the mask of 'layers.1.up.weight' has shape (2, 2), the parameter (21, 10)" in str(caught.value)
    assert "mask of 'layers.0.up.weight' keeps 1 of the weights, the plan says 0.5. HINT: make the plan" in str(
        caught.value
    )


def test_weights_of_a_dense_run_are_loaded_and_masked() -> None:
    dense = Net(density=1.0).state_dict()
    module = Net()
    module.load_state_dict(dense)
    _, module = train(build=lambda: module, steps=1)
    assert module.supar_plan is not None
    assert all(not module.get_parameter(n)[~module.supar_plan.mask(n)].any() for n in module.supar_plan.sparse)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    trainer, _ = train(precision="32-true")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for options, told in (({"seed": 2}, "masks"), ({"alpha_input": 3.0}, "alpha_input 2.0 there, 3.0 here")):
        with pytest.raises(ValueError, match=f"the checkpoint is of another plan: {told}.* HINT: make the plan as in"):
            train(build=lambda o=options: Net(**o), resume=tmp_path / "a.ckpt", precision="32-true")


def test_a_module_that_takes_anything_is_loaded(tmp_path: Path) -> None:
    class Anything(Net):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    trainer, _ = train(build=Anything, precision="32-true", steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    Anything.load_from_checkpoint(tmp_path / "a.ckpt")


def test_a_checkpoint_without_a_plan_gives_weights_only(tmp_path: Path) -> None:
    trainer, plain = train(build=Plain, precision="32-true", steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="of a training without a plan.* HINT: load only the weights"):
        train(precision="32-true", resume=tmp_path / "a.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    assert torch.equal(loaded.head.weight, plain.head.weight)


class Building(SuParMixin, LightningModule):
    """Builds its model in configure_model, anew each time."""

    def configure_model(self) -> None:
        self.model = Inner()
        self.supar_setup(plan_of(self, alpha_input=2.0))

    def training_step(self, batch: Any, index: int) -> Any:
        x = self.model.inward(batch)
        for layer in self.model.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.model.outward(x).flatten(0, 1), batch.roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.supar_param_groups(LR))


def test_a_model_that_is_built_anew_is_set_up_anew() -> None:
    _, module = train(build=Building, precision="32-true", steps=2)
    for _ in range(2):
        assert len(list(hooks_of(module))) == 2
        for name in module.supar_plan.sparse:  # type: ignore[union-attr]
            assert not module.get_parameter(name)[~module.state_dict()[f"{name}_mask"]].any()
        _, module = train(build=lambda module=module: module, precision="32-true", steps=2)  # type: ignore[misc]


def test_names_that_fit_several_parts_are_refused() -> None:
    class Twins(SuParMixin, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = Inner(), Inner()

    module = Twins()
    with pytest.raises(ValueError, match="names fit several parts of Twins: teacher, student. HINT: make the plan of"):
        module.supar_setup(plan_of(module.student))
    module.supar_setup(plan_of(module))


def test_one_model_in_two_modules_is_refused() -> None:
    one, other = Outer(), Outer()
    other.model = one.model
    one.supar_setup(plan_of(one.model))
    with pytest.raises(ValueError, match="is multiplied already, by the plan of another module"):
        other.supar_setup(plan_of(other.model))


def test_a_dense_plan_has_nothing_to_report(tmp_path: Path) -> None:
    class Dense(Building):
        def configure_model(self) -> None:
            self.model = Inner()
            self.supar_setup(plan_of(self, density=1.0))

    report = SparsityReport()
    train(build=Dense, precision="32-true", steps=1, callbacks=[report], logger=CSVLogger(tmp_path))
    assert report.rows == []
