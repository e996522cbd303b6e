"""SparseMask on a module without a plan: masks, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_paro.callbacks import SparseMask, SparsityReport
from tests.conformance.lisa_runs import quiet
from tests.distributed.supar import LAYERS, Net, Plain, Thawing, train

SPARSE = [f"layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in ("up", "down")]


def _densities(module: nn.Module) -> dict[str, float]:
    return {name: (p != 0).double().mean().item() for name, p in module.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize(
    ("options", "density"),
    [
        ({"density": 0.3}, 0.3), ({"kind": "nm", "n": 1, "m": 5, "exclude": ("down",)}, 0.2),
        ({"kind": "bernoulli", "density": 0.5}, 0.5), ({"kind": "er", "density": 0.4}, 0.4),
    ],
    ids=str,
)  # fmt: skip
def test_projections_of_blocks_are_sparse_and_stay_so(options: dict[str, Any], density: float) -> None:
    _, module = train(build=Plain, callbacks=[SparseMask(**options)])
    found = _densities(module)
    sparse = [name for name in SPARSE if "down" not in options.get("exclude", ()) or "up" in name]
    spread = 0.1 if options.get("kind") == "bernoulli" else 0.003
    for name, share in found.items():
        assert share == pytest.approx(density if name in sparse else 1, abs=spread), name
    masks = [name for name in module.state_dict() if name.endswith("_mask")]
    assert masks == [f"{name}_mask" for name in sparse]


def test_values_that_are_kept_are_the_users() -> None:
    torch.manual_seed(0)
    before = {name: p.detach().clone() for name, p in Plain().named_parameters()}
    _, module = train(build=Plain, callbacks=[SparseMask(0.5)], steps=1)
    after = dict(module.named_parameters())
    assert all((after[n] - value).abs().max() < 0.011 for n, value in before.items() if n not in SPARSE)
    for name in SPARSE:
        mask = module.state_dict()[f"{name}_mask"]
        assert (after[name] - before[name])[mask].abs().max() < 0.011
        assert not after[name][~mask].any()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    mask = SparseMask(0.5)
    trainer, module = train(build=Plain, callbacks=[mask], precision="32-true")
    assert not mask._dropped
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain = Plain()
    kept = plain.load_state_dict(torch.load(tmp_path / "a.ckpt", weights_only=False)["state_dict"], strict=False)
    assert not kept.missing_keys
    assert kept.unexpected_keys == [f"{name}_mask" for name in SPARSE]
    assert all(torch.equal(value, module.get_parameter(name)) for name, value in plain.named_parameters())


def test_gradients_are_masked_before_they_are_clipped() -> None:
    class Lengths(Plain):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            masks = {name: self.state_dict()[f"{name}_mask"] for name in SPARSE}
            seen.append(all(not self.get_parameter(name).grad[~mask].any() for name, mask in masks.items()))  # type: ignore[index]
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    seen: list[bool] = []
    train(build=Lengths, callbacks=[SparseMask(0.5)])
    assert seen == [True] * 5


@pytest.mark.parametrize(
    ("build", "callback", "message"),
    [
        (Plain, {}, "SparseMask.. has no density, and the module no plan. HINT: SparseMask.density=0.25."),
        (Net, {"density": 0.3}, "Net has the masks of its plan, and SparseMask has arguments for others. HINT"),
        (Plain, {"density": 0.5, "exclude": ("nothing",)}, "'nothing' matches no tensor"),
    ],
)
def test_what_is_refused(build: Any, callback: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(build=build, callbacks=[SparseMask(**callback)])


def test_fsdp_is_refused() -> None:
    trainer = quiet()
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(ValueError, match="FSDPStrategy does not say which part .* HINT: Trainer.strategy='paro_ggg'."):
        SparseMask(0.5).setup(trainer, Plain(), "fit")


def test_arguments() -> None:
    with pytest.raises(ValueError, match="density=2 must be above 0"):
        SparseMask(2)
    with pytest.raises(ValueError, match="kind='magic' is not one of"):
        SparseMask(0.5, kind="magic")  # type: ignore[arg-type]


class Stirring(torch.optim.SGD):
    """Moves every weight, whether it has a gradient or not, as optimizers do that mix the elements of a matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01)
        return loss


def test_an_optimizer_that_moves_masked_weights_does_not_wake_them() -> None:
    class Stirred(Plain):
        def configure_optimizers(self) -> Any:
            return Stirring(self.parameters(), lr=0.1)

    _, module = train(build=Stirred, callbacks=[SparseMask(0.5)])
    for name in SPARSE:
        assert not module.get_parameter(name)[~module.state_dict()[f"{name}_mask"]].any()


# ---- the report -----------------------------------------------------------------------------------------------------


def test_a_report_counts_what_is_there(tmp_path: Path, capsys: Any) -> None:
    report = SparsityReport()
    trainer, module = train(build=Net, callbacks=[report], logger=CSVLogger(tmp_path))
    assert [row["tensor"] for row in report.rows] == module.supar_plan.sparse  # type: ignore[union-attr]
    for row in report.rows:
        mask = module.supar_plan.mask(row["tensor"])  # type: ignore[union-attr, operator]
        assert row["density"] == row["nonzero"] == pytest.approx(mask.float().mean().item())
        assert row["weights_per_output"] == pytest.approx(mask.shape[1] * row["density"])
        assert row["cut_off"] == int((mask.sum(1) == 0).sum())
    text = capsys.readouterr().out
    assert "Sparsity at the start" in text
    assert "Sparsity in the end" in text
    folder = Path(trainer.log_dir or "")
    assert len((folder / "sparsity.csv").read_text().splitlines()) == 7
    assert "sparsity/density" in (folder / "metrics.csv").read_text()


def test_a_report_of_a_dense_model_says_so(caplog: Any) -> None:
    train(build=lambda: Net(density=1.0), callbacks=[SparsityReport()], steps=1)
    assert "no tensor has a mask. HINT: SparseMask" in caplog.text


# ---- whoever is trained, and however often ---------------------------------------------------------------------------


def _living(module: nn.Module) -> int:
    state = module.state_dict()
    return sum(int((state[name] * ~state[f"{name}_mask"]).count_nonzero()) for name in SPARSE)


class Late(Stirring):
    """Begins to stir at its third step, as under a warm-up from zero."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count < 3:
            return torch.optim.SGD.step(self, closure)
        return super().step(closure)


def test_an_optimizer_that_moves_masked_weights_later_does_not_wake_them_either() -> None:
    class Stirred(Plain):
        def configure_optimizers(self) -> Any:
            return Late(self.parameters(), lr=0.1)

    _, module = train(build=Stirred, callbacks=[SparseMask(0.5)])
    assert not _living(module)


def test_state_that_is_no_elements_own_is_left_alone() -> None:
    class Square(Stirring):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("statistics", torch.ones_like(parameter))
            return super().step(closure)

    class Stirred(Plain):
        def configure_optimizers(self) -> Any:
            return Square(self.parameters(), lr=0.1)

    trainer, _ = train(build=Stirred, callbacks=[SparseMask(0.5)])
    assert all(state["statistics"].all() for state in trainer.optimizers[0].state.values())


def test_frozen_weights_are_masked_and_stay_so_when_they_are_trained() -> None:
    _, module = train(build=Thawing, callbacks=[SparseMask(0.5)], steps=1)
    assert not _living(module)
    before = module.layers[1].up.weight.detach().clone()  # type: ignore[union-attr, index]
    _, module = train(build=Thawing, callbacks=[SparseMask(0.5)])
    assert not _living(module)
    assert not torch.equal(before, module.layers[1].up.weight)  # type: ignore[union-attr, index]


def test_weights_may_be_frozen_on_the_way() -> None:
    class Freezing(Plain):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 4:
                self.layers[1].requires_grad_(False)

    _, module = train(build=Freezing, callbacks=[SparseMask(0.5)])
    assert not _living(module)


def test_a_second_training_goes_on_with_the_masks_of_the_first() -> None:
    _, module = train(build=Plain, callbacks=[SparseMask(0.5, dynamic="rigl", every=1)])
    masks = {name: module.state_dict()[f"{name}_mask"] for name in SPARSE}
    _, module = train(build=lambda: module, callbacks=[SparseMask(0.5)])
    assert all(torch.equal(mask, module.state_dict()[f"{name}_mask"]) for name, mask in masks.items())
    with pytest.raises(ValueError, match="Plain was trained with other masks before: .*0.5.* there, .*0.25.* here"):
        train(build=lambda: module, callbacks=[SparseMask(0.25)])


def test_one_callback_for_two_modules() -> None:
    callback = SparseMask(0.5, dynamic="rigl", every=1)
    _, one = train(build=Plain, callbacks=[callback])
    first = Plain()
    _, other = train(build=lambda: first, callbacks=[callback], steps=1)
    assert [name for name in other.state_dict() if name.endswith("_mask")] == [f"{name}_mask" for name in SPARSE]
    _, fresh = train(build=Plain, callbacks=[SparseMask(0.5)], steps=1)
    for name in SPARSE:
        assert torch.equal(other.state_dict()[f"{name}_mask"], fresh.state_dict()[f"{name}_mask"])
    assert any(not torch.equal(one.state_dict()[f"{name}_mask"], other.state_dict()[f"{name}_mask"]) for name in SPARSE)


def test_masks_of_a_file_are_read_once(tmp_path: Any) -> None:
    path = tmp_path / "masks.pt"
    masks = {"layers.0.up.weight": torch.rand(21, 10) < 0.5}
    torch.save(masks, path)
    _, module = train(build=Plain, callbacks=[SparseMask(kind="file", path=str(path))], steps=1)
    path.unlink()
    assert torch.equal(module.state_dict()["layers.0.up.weight_mask"], masks["layers.0.up.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.5, "exclude": "model"}, r"exclude='model' must be several patterns. HINT: exclude=\('model',\)"),
        ({"seed": 3}, "SparseMask has kind='random', seed=3, .*and no density. HINT: SparseMask.density=0.25"),
        ({"density": 0.25, "kind": "nm"}, "keeps 2 of 4, a density of 0.5, but density=0.25"),
    ],
)
def test_arguments_that_would_be_passed_over(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMask(**options)


def test_averages_of_weights_whose_masks_change_are_refused() -> None:
    callbacks = [SparseMask(0.5, dynamic="gmp", every=1), StochasticWeightAveraging(0.1)]
    with pytest.raises(ValueError, match="dynamic='gmp' with StochasticWeightAveraging: .* HINT: static masks"):
        train(build=Plain, callbacks=callbacks)


def test_the_finder_of_learning_rates_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the learning rate finder trains without SparseMask"):
        train(build=lambda: _Tuned(), callbacks=[SparseMask(0.5), LearningRateFinder(num_training_steps=3)])


class _Tuned(Plain):
    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
