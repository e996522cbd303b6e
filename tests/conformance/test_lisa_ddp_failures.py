"""Runs under DDP that LISA refuses or that fail, and what the user keeps out of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_paro.callbacks import LISA
from tests.conformance.lisa_runs import Silent, assert_close, fit, loader, quiet, trained, values
from tests.distributed.lisa import batches, rank, train
from tests.distributed.pool import Pool, WorkerError

STEPS = 10


def _refused_then_without() -> tuple[dict[str, Tensor], Any]:
    """A run that LISA refuses, and then one without it of the same module."""
    torch.manual_seed(0)
    module = Silent()
    module._ddp_params_and_buffers_to_ignore = ["nothing"]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="num_layers=9"):
        quiet(callbacks=[LISA(num_layers=9)], strategy="ddp", devices=4).fit(module, loader(2))
    assert trained(module) == {name for name, _ in module.named_parameters()}
    data = torch.utils.data.DataLoader([batch.chunk(4)[rank()] for batch in batches(8)], batch_size=None)
    quiet(strategy="ddp", devices=4).fit(module, data)
    return values(module), module._ddp_params_and_buffers_to_ignore


def test_a_refused_run_leaves_no_layer_unsynchronised(pool: Pool) -> None:
    torch.manual_seed(0)
    _, whole = fit(None, Silent())
    for found, ignored in pool.run(_refused_then_without):
        assert_close(found, values(whole))
        assert ignored == ["nothing"]


class Ignoring(Silent):
    """The class itself says what DDP is to leave out."""

    _ddp_params_and_buffers_to_ignore = ["layers.1.inner.bias"]


def _ignoring() -> bool:
    torch.manual_seed(rank())
    _, module, _ = train(DDPStrategy(), 4, steps=STEPS, build=Ignoring)
    assert module._ddp_params_and_buffers_to_ignore == ["layers.1.inner.bias"]
    mine = module.get_parameter("layers.1.inner.bias").detach()
    others = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(others, mine)
    return all(torch.equal(mine, other) for other in others)


def test_what_the_user_keeps_out_of_ddp_stays_out(pool: Pool) -> None:
    assert pool.run(_ignoring) == [False] * 4


def _one_fails() -> None:
    class Fails(Silent):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == 5:
                raise KeyError("of the user's")
            return super().training_step(batch, index)

    module = Fails()
    try:
        train(DDPStrategy(), 4, steps=STEPS, build=lambda: module)
    finally:
        assert len(trained(module)) == 20


def test_an_error_reaches_the_user(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(_one_fails)
    assert caught.value.messages() == ["KeyError: 'of the user\\'s'"] * 4 or all(
        message is not None and message.startswith("KeyError") for message in caught.value.messages()
    )
