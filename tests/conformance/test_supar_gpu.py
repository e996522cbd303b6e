"""SμPar on a GPU: the same values, masks and training as on the CPU, and in half precision with a scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_paro.callbacks import SparseMask
from tests.distributed.supar import Net, Plain, by_hand, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class Late(Net):
    """Set up in configure_model, where the GPU is the default device."""

    def __init__(self) -> None:
        Plain.__init__(self)

    def configure_model(self) -> None:
        self.supar_setup(Net().supar_plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [Net, Late])
def test_training_equals_that_by_hand_on_the_cpu(build: Any) -> None:
    _, module = train(accelerator="gpu", build=build)
    for name, value in by_hand().items():
        torch.testing.assert_close(module.get_parameter(name).cpu(), value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("dynamic", [None, "rigl"])
def test_masked_weights_stay_zero(precision: Any, dynamic: Any) -> None:
    callbacks = [SparseMask(dynamic=dynamic, every=1)] if dynamic else []
    _, module = train(accelerator="gpu", precision=precision, callbacks=callbacks, steps=8)
    state = module.state_dict()
    for name in module.supar_plan.sparse:  # type: ignore[union-attr, operator]
        mask, value = state[f"{name}_mask"].cpu(), module.get_parameter(name).detach().cpu()
        assert not value[~mask].any(), name
        assert int(mask.sum()) == round(0.5 * mask.numel()), name
        assert value.isfinite().all(), name


def test_what_is_held_on_the_gpu_is_a_byte_a_weight() -> None:
    held: list[int] = []

    class Watched(SparseMask):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            held.append(sum(dropped.nbytes for dropped in self._dropped.values()))
            assert all(dropped.device.type == "cuda" for dropped in self._dropped.values())

    _, module = train(accelerator="gpu", build=Plain, callbacks=[Watched(0.5)], precision="32-true")
    masked = [name for name in module.state_dict() if name.endswith("_mask")]
    assert set(held) == {sum(module.state_dict()[name].numel() for name in masked)}


def test_initial_values_are_those_of_the_cpu() -> None:
    with torch.device("cuda"):
        there = Net()
    for name, value in Net().named_parameters():
        assert torch.equal(there.get_parameter(name).cpu(), value), name
