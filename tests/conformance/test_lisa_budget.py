"""How many layers fit into a memory: by the formula on a CPU, and by what was measured on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Save, fit, loader, quiet, trained
from tests.distributed.lisa import LAYERS, Net, batches, loss_of, train
from tests.distributed.pool import Pool

LAYER = 6 * 7 + 7 + 7 * 6
OUTSIDE = 11 * 6 + 2 * 6 + 6 * 11 + 11
TOTAL = OUTSIDE + LAYERS * LAYER


def needed(layers: int, per: tuple[int, int, int] = (4, 4, 8)) -> int:
    """Bytes of weights, gradients and Adam's moments, in float32 unless told."""
    weight, gradient, state = per
    return weight * TOTAL + (gradient + state) * (OUTSIDE + layers * LAYER)


class Constant(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batches(1)[0])


def _chosen(budget: int, strategy: Any = "auto", devices: int = 1, precision: Any = "32-true") -> int:
    _, _, lisa = train(
        strategy, devices, steps=2, precision=precision, sampler="uniform", memory_budget=budget, interval=1
    )
    assert {len(active) for _, _, active in lisa.periods} == {lisa.num_layers}
    return lisa.num_layers


@pytest.mark.parametrize("layers", [1, 3, LAYERS])
@pytest.mark.parametrize(("precision", "per"), [("32-true", (4, 4, 8)), ("bf16-true", (2, 2, 4))])
def test_on_a_cpu_the_formula_chooses(layers: int, precision: str, per: tuple[int, int, int]) -> None:
    assert _chosen(needed(layers, per), precision=precision) == layers
    assert _chosen(needed(layers + 1, per) - 1, precision=precision) == layers


def test_too_little_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="a memory of 5.26 KiB is not enough: one layer at a time takes .*HINT"):
        _chosen(needed(1) - 1)


def _on_ranks(strategy: Any, budget: int, precision: str = "32-true") -> int:
    return _chosen(budget, strategy if isinstance(strategy, DDPStrategy) else _paro(strategy), 4, precision)


def _paro(name: str) -> Any:
    return ParoStrategy(name, group_size=2)


def test_ddp_has_gradients_in_buckets_as_well(pool: Pool) -> None:
    twice, once = (4, 8, 8), (4, 4, 8)
    assert pool.run(_on_ranks, DDPStrategy(), needed(3, twice)) == [3] * 4
    assert pool.run(_on_ranks, DDPStrategy(), needed(3, twice) - 1) == [2] * 4
    assert pool.run(_on_ranks, DDPStrategy(gradient_as_bucket_view=True), needed(3, once)) == [3] * 4


def test_a_partition_divides_what_it_divides(pool: Pool) -> None:
    """nng: weights and gradients whole, state in four parts."""
    assert pool.run(_on_ranks, "nng", needed(2, (4, 4, 2)) + 8) == [2] * 4
    assert pool.run(_on_ranks, "nng", needed(2, (4, 4, 2)) - 8) == [1] * 4


def test_what_never_is_trained_takes_weights_only() -> None:
    lisa = LISA(interval=1, train_embeddings="never", memory_budget=needed(3) - 12 * 11 * 6)
    fit(lisa, precision="32-true")
    assert lisa.num_layers == 3


def test_the_choice_is_kept_when_resuming(tmp_path: Path) -> None:
    """Also where another one would be made today."""
    settings: dict[str, Any] = {"build": Constant, "precision": "32-true", "max_steps": 6}
    first = LISA(interval=2, memory_budget=needed(3))
    fit(first, callbacks=[Save(tmp_path / "mid.ckpt", 3)], **settings)
    second = LISA(interval=2, memory_budget=needed(5))
    fit(second, resume=tmp_path / "mid.ckpt", **settings)
    assert second.num_layers == first.num_layers == 3
    assert second.periods == first.periods


# ---- as on a GPU ----------------------------------------------------------------------------------------------------


class Gpu:
    """torch.cuda's account of memory, and a strategy that says its device is a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, activations: int, per_layer: int) -> None:
        self.resets = 0
        self.activations, self.per_layer = activations, per_layer
        self.asked: list[int] = []
        self.module: LightningModule | None = None
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", self._peak)

    def _reset(self, *_: Any) -> None:
        self.resets += 1

    def _peak(self, *_: Any) -> int:
        assert self.module is not None
        self.asked.append(self.module.trainer.global_step)
        return needed(1) + self.activations


def _fit_on_gpu(
    monkeypatch: pytest.MonkeyPatch, lisa: LISA, gpu: Gpu, resume: Path | None = None, **settings: Any
) -> Trainer:
    import lightning_paro.callbacks._budget as budget

    def on_gpu(method: Any) -> Any:
        def called(self: Any, trainer: Trainer, counts: Any) -> int:
            device = trainer.strategy._root_device
            trainer.strategy._root_device = _cuda  # only while the budget looks
            try:
                return method(self, trainer, counts)  # type: ignore[no-any-return]
            finally:
                trainer.strategy._root_device = device

        return called

    _cuda = torch.device("cuda", 0)
    tensor = torch.tensor
    monkeypatch.setattr(budget.Budget, "begin", on_gpu(budget.Budget.begin))
    monkeypatch.setattr(budget.Budget, "choose", on_gpu(budget.Budget.choose))
    monkeypatch.setattr(budget.torch, "tensor", lambda value, device=None, **kw: tensor(value, **kw))
    module = Constant()
    gpu.module = module
    trainer = quiet(callbacks=[lisa, *settings.pop("callbacks", ())], precision="32-true", **settings)
    trainer.fit(module, loader(8), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_on_a_gpu_the_first_period_measures(monkeypatch: pytest.MonkeyPatch, interval: int) -> None:
    """A fifth of the activations is taken for each layer more."""
    activations = 10_000
    gpu = Gpu(monkeypatch, activations, activations // LAYERS)
    budget = needed(3) + activations + 2 * (activations // LAYERS)
    lisa = LISA(interval=interval, memory_budget=budget)
    _fit_on_gpu(monkeypatch, lisa, gpu)
    assert gpu.resets == 1
    measured = max(2, interval)  # with state, and with gradients beside it
    assert gpu.asked == [measured]
    assert [len(active) for _, step, active in lisa.periods if step < measured] == [1] * (measured // interval)
    assert {len(active) for _, step, active in lisa.periods if step >= measured} == {3}


def test_a_byte_less_and_it_is_a_layer_less(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 10_000, 2_000)
    lisa = LISA(interval=2, memory_budget=needed(3) + 10_000 + 2 * 2_000 - 1)
    _fit_on_gpu(monkeypatch, lisa, gpu)
    assert lisa.num_layers == 2


def test_activations_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 10**9, 0)
    with pytest.raises(
        ValueError, match=r"not enough: one layer at a time takes .*, of which 953.67 MiB are not model"
    ):
        _fit_on_gpu(monkeypatch, LISA(interval=2, memory_budget=needed(3)), gpu)


@pytest.mark.parametrize(("step", "asked"), [(1, [2, 2]), (3, [2])])
def test_what_was_measured_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, asked: list[int]
) -> None:
    """But by a run that was saved before it had been."""
    gpu = Gpu(monkeypatch, 10_000, 2_000)
    periods = []
    for save in ([Save(tmp_path / "mid.ckpt", step)], []):
        lisa = LISA(interval=2, memory_budget=needed(3) + 10_000 + 2 * 2_000)
        with monkeypatch.context() as once:
            resume = None if save else tmp_path / "mid.ckpt"
            _fit_on_gpu(once, lisa, gpu, resume, callbacks=save, max_steps=8)
        periods.append(lisa.periods)
    assert gpu.asked == asked
    assert periods[0] == periods[1]


def test_another_model_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, 10_000, 2_000)
    lisa = LISA(interval=2, memory_budget=needed(3) + 10_000 + 2 * 2_000)
    _fit_on_gpu(monkeypatch, lisa, gpu)
    assert lisa.num_layers == 3
    with monkeypatch.context() as again:
        gpu.activations = 5_000
        _fit_on_gpu(again, lisa, gpu)
    assert gpu.asked == [2, 2]
    assert [len(active) for _, _, active in lisa.periods] == [1, *[lisa.num_layers] * 3]
    assert lisa.num_layers > 3
    assert gpu.module is not None
    assert len(trained(gpu.module)) == 20
