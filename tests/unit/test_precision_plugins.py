"""Lightning's precision plugins on one side, the engine's dtypes on the other; what is not in the table is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import precision as lightning_precision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_paro import ParoStrategy, Partition
from lightning_paro.sharding import PrecisionPolicy
from lightning_paro.strategies.precision import adopt, policy_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TABLE = {
    "32-true": (Precision, PrecisionPolicy()),
    "64-true": (DoublePrecision, PrecisionPolicy()),
    "bf16-mixed": (MixedPrecision, PrecisionPolicy(BF16, master_weights=True)),
    "bf16-true": (HalfPrecision, PrecisionPolicy()),
    "16-mixed": (MixedPrecision, PrecisionPolicy(FP16, master_weights=True, inter_dtype=FP32)),
}


def _plugin(precision: str) -> Precision:
    kind = TABLE[precision][0]
    if kind is MixedPrecision:
        return MixedPrecision(precision, "cpu")  # type: ignore[arg-type]
    return HalfPrecision(precision) if kind is HalfPrecision else kind()  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", TABLE)
def test_each_precision_of_the_table_has_its_policy(precision: str) -> None:
    plugin = adopt(_plugin(precision))
    kind, policy = TABLE[precision]
    assert isinstance(plugin, kind)
    assert plugin.precision == precision
    assert policy_for(plugin) == policy
    assert adopt(plugin) is plugin


@pytest.mark.parametrize(
    ("precision", "arguments", "expected"),
    [
        ("32-true", {"grad_dtype": "float32", "reduce_dtype": "float32"}, (FP32, FP32, FP32)),
        ("64-true", {"grad_dtype": "float64"}, (torch.float64, None, None)),
        ("bf16-mixed", {"grad_dtype": "bfloat16"}, (BF16, None, None)),
        ("bf16-mixed", {"grad_dtype": torch.float32}, (FP32, None, None)),
        ("bf16-mixed", {"reduce_dtype": "float32"}, (None, FP32, FP32)),
        ("bf16-true", {"grad_dtype": "float32", "reduce_dtype": "torch.float32"}, (FP32, FP32, FP32)),
        ("16-mixed", {"reduce_dtype": "float32"}, (None, FP32, FP32)),
    ],
)
def test_gradient_dtypes_go_into_the_policy(precision: str, arguments: dict[str, Any], expected: tuple) -> None:
    policy = policy_for(adopt(_plugin(precision)), **arguments)
    assert (policy.accumulator_dtype, policy.intra_dtype, policy.inter_dtype) == expected


@pytest.mark.parametrize("argument", ["grad_dtype", "reduce_dtype"])
@pytest.mark.parametrize(
    ("precision", "value", "fitting"),
    [
        ("32-true", "bfloat16", "'float32'"),
        ("32-true", "float64", "'float32'"),
        ("64-true", torch.float32, "'float64'"),
        ("bf16-mixed", "float16", "'float32' or 'bfloat16'"),
        ("bf16-true", "int8", "'float32' or 'bfloat16'"),
        ("16-mixed", "bfloat16", "'float32'"),
    ],
)
def test_a_gradient_dtype_that_does_not_fit_is_refused(argument: str, precision: str, value: Any, fitting: str) -> None:
    name = str(value).removeprefix("torch.")
    expected = f"{argument}='{name}' does not fit precision '{precision}': expected {fitting}. HINT: leave {argument}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        policy_for(adopt(_plugin(precision)), **{argument: value})


class OwnMixed(MixedPrecision):
    """A user's subclass may do anything."""


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (HalfPrecision("16-true"), "'16-true' (HalfPrecision)"),
        (lightning_precision.FSDPPrecision("bf16-mixed"), "'bf16-mixed' (FSDPPrecision)"),
        (lightning_precision.DeepSpeedPrecision("32-true"), "'32-true' (DeepSpeedPrecision)"),
        (OwnMixed("bf16-mixed", "cpu"), "'bf16-mixed' (OwnMixed)"),
    ],
)
def test_other_precisions_are_refused_by_name(plugin: Precision, name: str) -> None:
    expected = f"does not support precision {name}; expected one of 32-true, 64-true, bf16-mixed, bf16-true, 16-mixed"
    for use in (adopt, lambda plugin: ParoStrategy("iig", precision_plugin=plugin)):
        with pytest.raises(ValueError, match=re.escape(expected) + ".*HINT: .*bf16-mixed"):
            use(plugin)


@pytest.mark.parametrize("name", ["TransformerEnginePrecision", "XLAPrecision", "BitsandbytesPrecision"])
def test_precisions_of_libraries_that_are_not_installed_are_refused_too(name: str) -> None:
    kind = getattr(lightning_precision, name)
    plugin = kind.__new__(kind)  # the constructor needs the library
    with pytest.raises(ValueError, match=rf"does not support precision .* \({name}\); expected one of"):
        adopt(plugin)


@pytest.mark.parametrize("precision", [*TABLE, 32, 64, "bf16"])
def test_a_strategy_given_by_name_takes_every_precision_of_the_table(precision: Any) -> None:
    trainer = Trainer(strategy="paro_iig", precision=precision, accelerator="cpu", devices=1, logger=False)
    assert trainer.precision_plugin is trainer.strategy.precision_plugin
    assert trainer.precision_plugin is adopt(trainer.precision_plugin)
    name = {32: "32-true", 64: "64-true", "bf16": "bf16-mixed", "16-mixed": "bf16-mixed"}.get(precision, precision)
    assert trainer.precision == name  # Lightning makes fp16 bf16 on a CPU, and says so


@pytest.mark.parametrize("strategy", ["paro_iig", ParoStrategy])
def test_a_precision_outside_of_the_table_is_refused_by_the_trainer(strategy: Any) -> None:
    strategy = strategy if isinstance(strategy, str) else strategy("iig")
    with pytest.raises(ValueError, match="does not support precision '16-true'"):
        Trainer(strategy=strategy, precision="16-true", accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize("partition", [str(partition) for partition in Partition.valid()])
def test_a_plugin_of_the_users_is_adopted(partition: str) -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    trainer = Trainer(strategy=f"paro_{partition}", plugins=[plugin], accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.precision_plugin, MixedPrecision)
    assert policy_for(trainer.precision_plugin) == TABLE["bf16-mixed"][1]
    assert trainer.precision_plugin.device == "cpu"


def test_the_settings_of_a_scaler_are_kept() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    plugin = adopt(MixedPrecision("16-mixed", "cpu", given))
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    assert plugin.scaler is not given
    assert plugin.scaler.state_dict() == given.state_dict()
    assert plugin.state_dict() == given.state_dict()


def test_a_scaler_that_is_switched_off_stays_so() -> None:
    plugin = adopt(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False)))
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    assert not plugin.scaler.is_enabled()
    assert plugin.scaler.scale(torch.tensor(2.0)) == 2
