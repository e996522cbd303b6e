"""What the conformance tests share: a small model with a closed set of data, Trainers, and comparisons.

``Regressor`` takes the same eight samples per step whatever the number of ranks, so that one process on the whole batch
is the oracle of four ranks. Comparisons with it run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_paro import ParoStrategy, Partition

ALL = [str(partition) for partition in Partition.valid()]
SPREAD = ["nnn", "nig", "iig", "igg", "ggg"]


def by_default(*names: str, of: Sequence[str] = ALL) -> list[Any]:
    """Parameters for a test: those it has by default, and the others in the full run."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.full) for name in of]


COVER = by_default(*SPREAD)
GLOBAL_BATCH = 8
SAMPLES = 48


class Block(nn.Module):
    """Sizes that divide by nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 7, depth: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.outlet = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def samples(number: int = SAMPLES, seed: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, 5, generator=generator), torch.randn(number, 3, generator=generator))


class Regressor(LightningModule):
    """A two-block net on fixed data.

    Args:
        optimizer: ``"adamw"``, ``"sgd"`` (with momentum) or ``"adagrad"``.
        seed: Seed of the initial values; ranks other than 0 get other values, which must not matter.
    """

    def __init__(self, optimizer: str = "adamw", seed: int = 0) -> None:
        super().__init__()
        self.kind = optimizer
        with torch.random.fork_rng():
            torch.manual_seed(seed + 1000 * rank())
            self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.kind, self.parameters())

    def loader(self) -> DataLoader:
        """In order: the sampler that Lightning injects for training shuffles."""
        ranks, data = self.trainer.world_size, samples()
        ordered = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=GLOBAL_BATCH // ranks, sampler=ordered)

    train_dataloader = val_dataloader = test_dataloader = loader


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)
    return torch.optim.Adagrad(parameters, lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def trainer(strategy: Any, root: str, **arguments: Any) -> Trainer:
    """A quiet Trainer: of four ranks, or of one process for the strategy ``"one"``.

    A name of three letters stands for that partition in two groups of two ranks.
    """
    one = strategy == "one"
    if isinstance(strategy, str) and strategy in ALL:
        strategy = ParoStrategy(strategy, group_size=2)
    settings = {
        "accelerator": "cpu",
        "devices": 1 if one else 4,
        "strategy": "auto" if one else strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 2,
    }
    return Trainer(**(settings | arguments))


def values(module: nn.Module) -> dict[str, Any]:
    """The whole state of a module, in a form that is cheap to send between processes."""
    return {name: tensor.numpy(force=True).copy() for name, tensor in module.state_dict().items()}


def load(path: str | Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def assert_close(given: Any, expected: Any, tolerance: float = 1e-9, where: str = "") -> None:
    """Compare two trees of dicts, lists, numbers and tensors; a tensor relative to its largest value."""
    if isinstance(expected, Mapping):
        assert list(given) == list(expected), f"{where}: {sorted(map(str, given))} != {sorted(map(str, expected))}"
        for key, value in expected.items():
            assert_close(given[key], value, tolerance, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(given) == len(expected), f"{where}: {len(given)} != {len(expected)} items"
        for index, value in enumerate(expected):
            assert_close(given[index], value, tolerance, f"{where}/{index}")
    elif hasattr(expected, "shape"):
        given, expected = torch.as_tensor(given), torch.as_tensor(expected)
        assert given.shape == expected.shape, f"{where}: {given.shape} != {expected.shape}"
        assert given.dtype == expected.dtype, f"{where}: {given.dtype} != {expected.dtype}"
        assert given.isfinite().all(), f"{where} is not finite"
        assert expected.isfinite().all(), f"{where}: the oracle is not finite"
        if expected.numel():
            error = (given.double() - expected.double()).abs().max()
            assert error <= tolerance * expected.double().abs().max().clamp(min=1e-12), f"{where}: off by {error}"
    elif isinstance(expected, float):
        assert math.isclose(given, expected, rel_tol=tolerance), f"{where}: {given} != {expected}"
    else:
        assert given == expected, f"{where}: {given} != {expected}"


def assert_equal(given: Any, expected: Any) -> None:
    """Bit for bit."""
    assert_close(given, expected, tolerance=0.0)
