"""What is refused, and that the message says what was given, what is expected and what to do, on all ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, Precision, TransformerEnginePrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from lightning_paro import ParoStrategy, Partition
from tests.conformance.support import Net, Regressor, assert_close, by_default, rank, trainer, values
from tests.distributed.pool import WORLD_SIZE, Pool, WorkerError


def _expect(pool: Pool, *patterns: str) -> Any:
    """A caller of ``pool.run`` that expects an error with these texts on every rank."""

    def run(function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(WorkerError) as caught:
            pool.run(function, *args, **kwargs)
        for message in caught.value.messages():
            assert message is not None
            for pattern in patterns:
                assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"

    return run


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("paro_gii", "paro_iii, paro_gig"),
        ("paro_ggi", "paro_iii|paro_ggg"),
        ("PARO_NIN", "paro_nnn, paro_nii"),
        ("paro_inn", "paro_nnn, paro_ini"),
    ],
)
def test_a_name_that_breaks_the_rule_says_the_rule_and_the_nearest_valid_names(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="split at least as finely as parameters and gradients, os >= max") as caught:
        Trainer(accelerator="cpu", devices=2, strategy=name)
    assert f"'{name[-3:].lower()}' is not a useful partition" in str(caught.value)
    assert re.search(f"HINT: the nearest valid names are .*({nearest})", str(caught.value))


def test_all_27_names_are_registered_so_that_none_gets_lightnings_bare_error() -> None:
    names = {f"paro_{a}{b}{c}" for a in "nig" for b in "nig" for c in "nig"}
    assert names | {"paro_auto"} == {n for n in StrategyRegistry.available_strategies() if n.startswith("paro_")}
    for name in names:
        if name[-3:] in map(str, Partition.valid()):
            assert str(StrategyRegistry.get(name).partition) == name[-3:]
        else:
            with pytest.raises(ValueError, match="is not a useful partition"):
                StrategyRegistry.get(name)


@pytest.mark.parametrize("name", ["xyz", "ii", "iigg", "", "paro_", "i-g"])
def test_a_misspelt_partition_is_shown_with_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match="expected three letters out of n, i and g") as caught:
        ParoStrategy(name)
    assert repr(name) in str(caught.value)
    assert all(str(partition) in str(caught.value) for partition in Partition.valid())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not understood: expected one of 'propagate', 'skip', 'raise'"),
        ({"start_method": "thread"}, "start_method='thread' is not understood: expected one of 'popen', 'spawn'"),
        ({"activation_checkpointing": [3]}, "activation_checkpointing=.*must name subclasses of torch.nn.Module"),
        ({"activation_checkpointing": int}, "activation_checkpointing=.*must name subclasses of torch.nn.Module"),
    ],
)
def test_an_argument_that_is_not_understood_is_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParoStrategy("iig", **arguments)


# ---- topology, precision, optimizers --------------------------------------------------------------------------------


def _fit(root: str, module: type[Regressor] = Regressor, strategy: Any = None, **arguments: Any) -> dict[str, Any]:
    model = module()
    trainer(strategy if isinstance(strategy, str) else ParoStrategy(**(strategy or {})), root, **arguments).fit(model)
    return values(model)


def test_a_group_size_that_does_not_divide_the_world_prints_the_arithmetic(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, r"group_size=3 does not divide world_size=4: 4 = 1 \* 3 \+ 1", r"HINT: .* from \{1, 2, 4\}")
    run(_fit, str(tmp_path), strategy={"group_size": 3})
    with pytest.raises(ValueError, match="group_size=3 does not divide world_size=4"):  # before anything is started
        Trainer(accelerator="cpu", devices=4, strategy=ParoStrategy(group_size=3))


@pytest.mark.parametrize("precision", ["16-true", "transformer-engine"])
def test_a_refused_precision_is_named_with_the_supported_ones(precision: str) -> None:
    expected = "(does not support precision|ransformer.?[eE]ngine)"  # Lightning itself misses the package first
    with pytest.raises((ValueError, ModuleNotFoundError), match=expected):
        Trainer(accelerator="cpu", devices=2, strategy="paro_iig", precision=precision)


class _Foreign(TransformerEnginePrecision):
    """The real one needs a package and a GPU."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (HalfPrecision("16-true"), "'16-true' \\(HalfPrecision\\)"),
        (FSDPPrecision("bf16-mixed"), "'bf16-mixed' \\(FSDPPrecision\\)"),
        (_Foreign(), "'transformer-engine' \\(_Foreign\\)"),
        (type("Own", (Precision,), {})(), "'32-true' \\(Own\\)"),
    ],
    ids=["16-true", "fsdp", "transformer-engine", "own"],
)
@pytest.mark.parametrize("where", ["plugins", "strategy"])
def test_a_refused_precision_plugin_is_named(plugin: Precision, name: str, where: str) -> None:
    expected = f"ParoStrategy does not support precision {name}; expected one of 32-true, 64-true, bf16-mixed"
    in_trainer = partial(Trainer, accelerator="cpu", devices=2, strategy="paro_iig", plugins=[plugin])
    in_strategy = partial(ParoStrategy, "iig", precision_plugin=plugin)
    with pytest.raises(ValueError, match=expected):
        (in_trainer if where == "plugins" else in_strategy)()


@pytest.mark.parametrize(
    ("precision", "argument", "fitting"),
    [
        ("32-true", {"grad_dtype": "bfloat16"}, "'float32'"),
        ("64-true", {"grad_dtype": "float32"}, "'float64'"),
        ("bf16-mixed", {"grad_dtype": "float16"}, "'float32' or 'bfloat16'"),
        ("32-true", {"reduce_dtype": "bfloat16"}, "'float32'"),
    ],
)
def test_a_dtype_that_does_not_fit_the_precision_is_refused(
    pool: Pool, tmp_path: Path, precision: str, argument: dict[str, str], fitting: str
) -> None:
    ((name, value),) = argument.items()
    run = _expect(pool, f"{name}='{value}' does not fit precision '{precision}': expected {fitting}", f"HINT: .*{name}")
    run(_fit, str(tmp_path), strategy=argument, precision=precision)


class _Mixing(Regressor):
    """Muon takes matrices only."""

    make: Any

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make([p for p in self.parameters() if p.dim() == 2], lr=1e-3)


class _LBFGS(_Mixing):
    make = torch.optim.LBFGS


class _Adafactor(_Mixing):
    make = torch.optim.Adafactor


class _Muon(_Mixing):
    make = torch.optim.Muon


@pytest.mark.parametrize(
    ("module", "reason"),
    [(_LBFGS, "builds a curvature estimate"), (_Adafactor, "factors the second moment"), (_Muon, "orthogonalises")],
)
def test_an_optimizer_that_mixes_elements_is_refused_unless_its_state_is_whole(
    pool: Pool, tmp_path: Path, module: type[Regressor], reason: str
) -> None:
    for partition in ("nni", "iig"):
        given = f"{module.make.__name__} {reason}.*cannot work on flat shards"
        run = _expect(pool, given, "HINT: .*strategy='paro_nnn'")
        run(_fit, str(tmp_path), module, {"partition": partition})
    arguments = {"precision": "64-true", "limit_train_batches": 2, "limit_val_batches": 0}
    expected = _fit(str(tmp_path), module, "one", **arguments)
    for weights in pool.run(_fit, str(tmp_path), module, "nnn", **arguments):
        assert_close(weights, expected, tolerance=1e-6 if module is _LBFGS else 1e-9)


class _Strangers(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.parameters(), nn.Parameter(torch.zeros(4, 9))])


@pytest.mark.parametrize("partition", ["nnn", "iig"])
def test_an_optimizer_that_holds_tensors_of_nobody_is_refused(pool: Pool, tmp_path: Path, partition: str) -> None:
    run = _expect(pool, r"tensor of shape \(4, 9\) is not a parameter of _Strangers", "HINT: build optimizers in")
    run(_fit, str(tmp_path), _Strangers, {"partition": partition})


class _Block(nn.Module):
    pass


def test_units_that_select_nothing_are_refused(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, "units=.*_Block.* selects no module of Regressor", "HINT: .*units='auto'")
    run(_fit, str(tmp_path), strategy={"units": {_Block}})
    run = _expect(pool, "activation_checkpointing=_Block selects no module of Regressor", "HINT: ")
    run(_fit, str(tmp_path), strategy={"activation_checkpointing": _Block})


# ---- checkpoints ----------------------------------------------------------------------------------------------------


class _Wider(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(width=8, depth=3)


def _load_another(root: str, strategy: str) -> None:
    trainer(strategy, root).validate(_Wider(), ckpt_path=f"{root}/narrow.ckpt")


@pytest.mark.parametrize("partition", ["nnn", "iig"])
def test_a_checkpoint_of_another_architecture_shows_the_first_differences(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    run = trainer("one", str(tmp_path))
    run.fit(Regressor())
    run.save_checkpoint(tmp_path / "narrow.ckpt")
    expect = _expect(
        pool,
        "the checkpoint is of another architecture than _Wider, 21 entries differ",
        r"'net.inlet.weight': \(7, 5\) in the checkpoint, \(8, 5\) in the model",
        r"\.\.\. and 15 more",
        "HINT: .*strict_loading = False",
    )
    expect(_load_another, str(tmp_path), partition)


class _OneGroupMore(Regressor):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        inlet, *others = self.parameters()
        return torch.optim.AdamW([{"params": [inlet]}, {"params": others}])


def test_a_checkpoint_of_other_param_groups_shows_both(pool: Pool, tmp_path: Path) -> None:
    run = trainer("one", str(tmp_path))
    run.fit(Regressor())
    run.save_checkpoint(tmp_path / "one-group.ckpt")
    expect = _expect(pool, r"AdamW has param groups of \[16\] parameters, this one of \[1, 15\]", "HINT: ")
    expect(_fit_from, str(tmp_path), f"{tmp_path}/one-group.ckpt")


def _fit_from(root: str, path: str) -> None:
    trainer("iig", root, max_epochs=2).fit(_OneGroupMore(), ckpt_path=path)


# ---- released parameters and gradients ------------------------------------------------------------------------------


class _Peeking(Callback):
    def __init__(self, name: str, do: str) -> None:
        self.name, self.do = name, do

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        parameter = module.get_parameter(self.name)
        assert parameter.shape.numel() == parameter.numel()  # may be asked
        if self.do == "norm":
            parameter.norm()
        elif self.do == "set":
            with torch.no_grad():
                parameter[0] = 1.0
        elif self.do == "forward":
            module.net.outlet(torch.zeros(1, 7))
        elif self.do == "state_dict":
            torch.stack([value.sum() for value in module.state_dict().values()])


@pytest.mark.parametrize("do", ["norm", "set", "forward", "state_dict"])
def test_a_released_parameter_names_itself_its_unit_and_the_remedy(pool: Pool, tmp_path: Path, do: str) -> None:
    name, unit = ("net.outlet.weight", "rest") if do == "forward" else ("net.blocks.1.up.weight", "net.blocks.1")
    if do == "state_dict":
        name, unit = "net.inlet.weight", "rest"
    run = _expect(
        pool,
        f"parameter '{name}' of unit '{unit}' is released: its values are in shards",
        r"HINT: on all ranks, wrap the code in `with trainer\.strategy\.full_parameters\(module\):`.*writeback=True",
    )
    for partition in ("iig", "ggg"):
        run(_fit, str(tmp_path), strategy={"partition": partition}, callbacks=[_Peeking(name, do)])
    pool.run(_fit, str(tmp_path), strategy={"partition": "nig"}, callbacks=[_Peeking(name, do)])


class _OutsideItsUnit(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.net.blocks[1].up.weight.square().sum()


def test_a_parameter_of_a_block_used_outside_of_it_in_a_step_is_refused(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, r"'net\.blocks\.1\.up\.weight' of unit 'net\.blocks\.1' is released", "full_parameters")
    run(_fit, str(tmp_path), _OutsideItsUnit, {"partition": "iig"})


class _OwnClipping(Regressor):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_clipping_by_hand_is_right_or_refused(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, "gradient of 'net.inlet.weight' lies in shards", r"HINT: .*trainer\.strategy\.grad_norm\(\)")
    for partition in ("nni", "iig", "ggg"):
        run(_fit, str(tmp_path), _OwnClipping, {"partition": partition})
    expected = _fit(str(tmp_path), _OwnClipping, "one", precision="64-true")
    for weights in pool.run(_fit, str(tmp_path), _OwnClipping, "nnn", precision="64-true"):
        assert_close(weights, expected)


# ---- non-finite gradients -------------------------------------------------------------------------------------------


class _Infinite(Regressor):
    """The loss of rank 2 is infinite at the third step; the other ranks see nothing of it in their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and (rank() == 2 or self.trainer.world_size == 1) else loss

    def on_train_batch_end(self, *_: Any) -> None:
        with self.trainer.strategy.full_parameters():
            self.seen = [*getattr(self, "seen", []), self.net.outlet.bias.detach().clone()]


def _fit_infinite(root: str, partition: str, nonfinite: str) -> list[bool]:
    """For every step whether it changed the parameters, and whether they are finite at the end."""
    module = _Infinite()
    trainer(ParoStrategy(partition, group_size=2, nonfinite=nonfinite), root).fit(module)
    moved = [not torch.equal(a, b) for a, b in zip(module.seen, module.seen[1:], strict=False)]
    return [*moved, bool(module.seen[-1].isfinite().all())]


@pytest.mark.parametrize("partition", by_default("nnn", "iig", of=["nnn", "iig", "ggg"]))
def test_a_gradient_that_is_not_finite_on_one_rank_is_treated_alike_on_all(
    pool: Pool, tmp_path: Path, partition: str
) -> None:
    root = str(tmp_path)
    skipped = pool.run(_fit_infinite, root, partition, "skip")
    assert skipped == [[True, False, True, True, True, True]] * WORLD_SIZE
    propagated = pool.run(_fit_infinite, root, partition, "propagate")
    assert propagated == [[True, True, True, True, True, False]] * WORLD_SIZE  # NaN is unequal to NaN
    run = _expect(pool, "a gradient is not finite on at least one rank, and nonfinite='raise'", "HINT: .*'skip'")
    run(_fit_infinite, root, partition, "raise")


# ---- callbacks and compilation --------------------------------------------------------------------------------------


def _average(root: str, kind: type[Callback], arguments: dict[str, float]) -> None:
    trainer("iig", root, callbacks=[kind(**arguments)]).fit(Regressor())


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(StochasticWeightAveraging, {"swa_lrs": 1e-2}), (WeightAveraging, {}), (EMAWeightAveraging, {})],
)
def test_callbacks_that_average_weights_are_refused(
    pool: Pool, tmp_path: Path, kind: type[Callback], arguments: dict[str, float]
) -> None:
    run = _expect(pool, f"{kind.__name__} averages the module's parameters", "HINT: remove the callback")
    run(_average, str(tmp_path), kind, arguments)


def test_pruning_meets_released_parameters(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, "is released", "full_parameters")
    run(_fit, str(tmp_path), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def _compiled_module(root: str) -> None:
    trainer("iig", root).fit(torch.compile(Regressor(), backend="eager"))


def test_a_compiled_lightning_module_is_refused(pool: Pool, tmp_path: Path) -> None:
    run = _expect(pool, "compiled model is incompatible with the current strategy: `ParoStrategy`")
    run(_compiled_module, str(tmp_path))


class _CompiledNet(Regressor):
    """``torch.compile(net)`` puts a module around the net, whose name is in every key of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="aot_eager")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {k.replace("_orig_mod.", ""): v for k, v in super().state_dict(*args, **kwargs).items()}


class _CompiledInPlace(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


@pytest.mark.parametrize("module", [_CompiledNet, _CompiledInPlace])
def test_a_model_compiled_inside_of_the_module_trains_as_it_does_uncompiled(
    pool: Pool, tmp_path: Path, module: type[Regressor]
) -> None:
    arguments = {"precision": "64-true", "limit_train_batches": 3, "limit_val_batches": 1}
    expected = _fit(str(tmp_path), Regressor, "one", **arguments)
    for weights in pool.run(_fit, str(tmp_path), module, "iig", **arguments):
        assert_close(weights, expected)


# ---- lightning and pytorch_lightning --------------------------------------------------------------------------------


MIXED = {
    "the name": "Trainer(strategy='paro_iig', accelerator='cpu', devices=2, logger=False)",
    "the instance": "Trainer(strategy=lightning_paro.ParoStrategy(), accelerator='cpu', devices=2, logger=False)",
}


@pytest.mark.parametrize(
    "order", ["pytorch_lightning first", pytest.param("lightning_paro first", marks=pytest.mark.full)]
)
def test_a_trainer_of_pytorch_lightning_says_which_import_to_use(tmp_path: Path, order: str) -> None:
    imports = ["import pytorch_lightning.strategies", "import lightning_paro"]
    if order == "lightning_paro first":
        imports.reverse()
    attempts = "\n".join(
        f"try: {code}\nexcept Exception as error: print({name!r}, type(error).__name__, error)"
        for name, code in MIXED.items()
    )
    code = "\n".join([*imports, "from pytorch_lightning import Trainer", attempts])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    by_name, by_instance = [line for line in done.stdout.splitlines() if line.startswith("the ")]
    assert done.returncode == 0
    if order == "pytorch_lightning first":
        assert "TypeError" in by_name
        assert "HINT: import everything from `lightning.pytorch`" in by_name
    else:
        assert "ValueError You selected an invalid strategy name" in by_name
    assert "ValueError You selected an invalid strategy name" in by_instance


def _module_of_pytorch_lightning(root: str) -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        pass

    trainer("iig", root).fit(Other())


def _callback_of_pytorch_lightning(root: str) -> None:
    import pytorch_lightning

    trainer("iig", root, callbacks=[pytorch_lightning.callbacks.EarlyStopping("val_loss")]).fit(Regressor())


def test_modules_and_callbacks_of_pytorch_lightning_are_refused(pool: Pool, tmp_path: Path) -> None:
    _expect(pool, "TypeError", "pytorch_lightning")(_module_of_pytorch_lightning, str(tmp_path))
    run = _expect(pool, "TypeError", "EarlyStopping", "HINT: import everything from `lightning.pytorch`")
    run(_callback_of_pytorch_lightning, str(tmp_path))
