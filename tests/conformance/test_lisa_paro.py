"""LISA under ParoStrategy beside the loops, and in one run after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paro import ParoStrategy
from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Save, assert_close, quiet, trained, values
from tests.conformance.support import by_default
from tests.distributed.lisa import TABLE, Net, batches, loss_of, rank, table
from tests.distributed.pool import Pool


class Validated(Net):
    """Validates on one batch, of which every rank has its part."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return loss_of(self, batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.losses.append(loss_of(self, batches(9)[8].to(batch.device)).item())

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(batches(1), batch_size=None)


def _data(devices: int) -> Any:
    mine = [batch.chunk(devices)[rank() % devices] for batch in batches(8)]
    return torch.utils.data.DataLoader(mine, batch_size=None)


def _run(
    strategy: Any, devices: int, error: bool = False, **options: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """A run that fails if asked to; one of the same module; and a third by another Trainer, each with validation."""
    torch.manual_seed(0)
    module = Validated()
    lisa = LISA(interval=2, sampler=table, **options)
    settings: dict[str, Any] = {"strategy": strategy(), "devices": devices, "val_check_interval": 3}
    if error:
        with pytest.raises(FileNotFoundError):
            quiet(callbacks=[lisa, Fails("/nowhere", 3)], **{**settings, "strategy": strategy()}).fit(
                module, _data(devices)
            )
        assert len(trained(module)) == 20
        module = Validated()
        torch.manual_seed(0)
        module.load_state_dict(Validated().state_dict())
    trainer = quiet(callbacks=[lisa], **settings)
    trainer.fit(module, _data(devices))
    assert len(trained(module)) == 20
    trainer.validate(module)
    assert [active for _, _, active in lisa.periods] == TABLE[:4]
    trainer = quiet(callbacks=[lisa], **{**settings, "strategy": strategy()})
    trainer.fit(module, _data(devices))
    assert [active for _, _, active in lisa.periods] == TABLE[:4]
    return module.losses, values(module), trained(module)


class Fails(Save):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise FileNotFoundError(self.path)


def _on_ranks(partition: str, error: bool, policy: str) -> tuple[list[float], dict[str, Tensor], Any]:
    return _run(lambda: ParoStrategy(partition, group_size=2), 4, error, state_policy=policy)


@pytest.mark.parametrize("partition", by_default("ggg", of=["nnn", "nig", "ggg"]))
@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (False, "drop_frozen"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [(True, "reset_all"), (False, "offload")]),
    ],
)
def test_several_runs_with_validation_equal_those_of_one_process(
    pool: Pool, partition: str, error: bool, policy: str
) -> None:
    losses, whole, names = _run(lambda: "auto", 1, error, state_policy=policy)
    assert len(losses) == 7  # two sanity checks, twice in each run, and once by itself
    assert len(set(losses[:3])) == 3
    for found_losses, found, found_names in pool.run(_on_ranks, partition, error, policy):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        assert found_names == names
        assert_close(found, whole)
