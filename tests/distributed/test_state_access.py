"""The protocol of callbacks: the same answers in one process and under every kind of partition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_paro import ParoStrategy, state_access
from tests.distributed.pool import Pool

PARTITIONS = ["nnn", "nig", "iii", "iig", "ing", "ggg"]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = torch.tanh(block(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Run(Callback):
    """Freezes block 1 after two steps, unfreezes it after four; notes what it sees."""

    def __init__(self, keep_master: bool = False) -> None:
        self.seen: dict[str, Any] = {"norms": [], "held": [], "traffic": [], "states": []}
        self.keep_master = keep_master

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        access = state_access(trainer)
        total = torch.zeros((), dtype=torch.float64)
        for shard in access.trainable_shards().values():
            total += shard.grad.double().square().sum()
            assert shard.value.numel() <= shard.full_shape.numel() - shard.offset
        self.seen["norms"].append(access.reduce_over_shards(total).sqrt().item())

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        access = state_access(trainer)
        if batch_idx in (1, 3):
            access.set_trainable(module.blocks[1], batch_idx == 3, keep_master=self.keep_master)
        self.seen["states"].append(sorted(n for n, s in access.trainable_shards().items() if "exp_avg" in s.state))
        if isinstance(trainer.strategy, ParoStrategy):
            traffic = trainer.strategy.engine.traffic
            self.seen["traffic"].append(traffic.intra + traffic.inter)
            traffic.reset()
            self.seen["held"].append(trainer.strategy.engine.held_bytes())
        with access.full_parameters(module, writeback=True):
            module.blocks[0].bias.data += 0.5


def _train(strategy: Any, devices: int, precision: str = "64-true", keep_master: bool = False) -> Any:
    seed_everything(0, verbose=False)
    run, module = Run(keep_master), Net()
    rows = torch.randn(6 * 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = rows if precision == "64-true" else rows.float()
    rank = torch.distributed.get_rank() if devices > 1 else 0
    mine = [rows[i * 8 : (i + 1) * 8].chunk(devices)[rank] for i in range(6)]
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", precision=precision, max_epochs=1, logger=False,
        callbacks=[run], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))
    return [p.detach() for p in module.parameters()], run.seen


def _on_ranks(strategy: str, **kwargs: Any) -> Any:
    return _train(ParoStrategy(strategy, group_size=2), 4, **kwargs)


@pytest.mark.parametrize("strategy", PARTITIONS)
def test_freezing_norms_and_writing_back_equal_one_process(pool: Pool, strategy: str) -> None:
    expected, seen = _train("auto", 1)
    for parameters, here in pool.run(_on_ranks, strategy):
        for value, truth in zip(parameters, expected, strict=True):
            torch.testing.assert_close(value, truth, rtol=0, atol=1e-10)
        torch.testing.assert_close(here["norms"], seen["norms"], rtol=1e-10, atol=0)


@pytest.mark.parametrize("strategy", PARTITIONS)
def test_a_frozen_block_gives_back_bytes_and_state_and_moves_nothing(pool: Pool, strategy: str) -> None:
    for _, seen in pool.run(_on_ranks, strategy, precision="bf16-mixed"):
        assert not any("blocks.1" in name for name in seen["states"][1])
        assert not any("blocks.1" in name for name in seen["states"][2])
        before, frozen = seen["held"][0], seen["held"][2]
        assert frozen["master"] * 3 == before["master"] * 2
        # of parameters that are cast from their masters, a third is frozen and held in bf16 now
        assert frozen["parameters"] == (before["parameters"] or before["master"] // 6)
        gathers = {"n": 0, "i": 1, "g": 1}[strategy[0]]
        if not gathers:  # without gathers all traffic is of gradients and updates, two thirds of which are left
            assert seen["traffic"][2] * 3 == seen["traffic"][1] * 2
        else:
            assert seen["traffic"][2] < seen["traffic"][1]


def _engine_of_masters(partition: str) -> Any:
    """An engine in bf16 whose masters are no bf16 numbers."""
    from lightning_paro.collectives import ProcessGroups
    from lightning_paro.sharding import Engine, PrecisionPolicy
    from lightning_paro.topology import Partition, Topology

    block = nn.Linear(8, 8)
    policy = PrecisionPolicy(torch.bfloat16, master_weights=True)
    engine = Engine(block, Partition.parse(partition), ProcessGroups.create(Topology(4, 2)), policy=policy)
    entries = engine.attach(torch.optim.SGD(block.parameters(), lr=1.0))
    with torch.no_grad():
        for entry in entries.entries():
            entry.fill_(1.0 + 2**-12)
    engine.update({flat: flat.indices for flat in engine.flats})
    return engine, block


def _frozen_for_a_while(keep: bool, partition: str) -> Any:
    engine, block = _engine_of_masters(partition)
    engine.set_trainable(block.parameters(), False, keep_master=keep)
    engine.set_trainable(block.parameters(), True)
    engine.close()
    return block.weight.detach()


@pytest.mark.parametrize("partition", ["iig", "iii", "ggg"])
def test_a_kept_master_survives_freezing_and_a_dropped_one_is_rounded(pool: Pool, partition: str) -> None:
    assert all(bool((weight == 1.0 + 2**-12).all()) for weight in pool.run(_frozen_for_a_while, True, partition))
    assert all(bool((weight == 1.0).all()) for weight in pool.run(_frozen_for_a_while, False, partition))


def _written_in_part(partition: str) -> Any:
    engine, block = _engine_of_masters(partition)
    with engine.full_parameters(writeback=True):
        block.weight.data[0] = 2.0
    engine.close()
    return block.weight.detach()


@pytest.mark.parametrize("partition", ["iig", "iii", "ggg"])
def test_a_master_keeps_what_a_writer_left_alone(pool: Pool, partition: str) -> None:
    for weight in pool.run(_written_in_part, partition):
        assert bool((weight[0] == 2.0).all())
        assert bool((weight[1:] == 1.0 + 2**-12).all())


def _frozen_in_part(keep_state: bool, partition: str) -> Any:
    """Weight and bias share a flat buffer; the bias is frozen after a backward."""
    engine, block = _engine_of_masters(partition)
    optimizer = engine.optimizers[0].optimizer
    optimizer.param_groups[0]["momentum"] = 0.9
    seen = []
    for bias in (True, False, True):
        engine.step_begin()
        loss = block(torch.ones(1, 8, dtype=torch.bfloat16)).sum()
        engine.step_end(backward_follows=True)
        engine.backward_begin()
        loss.backward()
        engine.backward_end()
        engine.set_trainable([block.bias], bias, keep_state=keep_state)
        shown = block.weight.grad is not None, block.bias.grad is not None
        optimizer.step()
        state = {name for flat, index in engine.optimizers[0].members() for name in [flat.slots[index].name]
                 if flat.entries[index] is not None and dict.get(optimizer.state, flat.entries[index])}  # fmt: skip
        seen.append((*shown, state))
        optimizer.zero_grad()
    engine.close()
    return seen, block.bias.detach()


@pytest.mark.parametrize("keep_state", [False, True])
@pytest.mark.parametrize("partition", ["nnn", "iig", "ggg"])
def test_what_is_frozen_in_a_unit_that_goes_on_gives_back_gradient_and_state(
    pool: Pool, partition: str, keep_state: bool
) -> None:
    ranks = pool.run(_frozen_in_part, keep_state, partition)
    for step in range(3):
        shown = {seen[step][:2] for seen, _ in ranks}
        assert shown == {(True, step == 0)}, "what is woken after a backward has no gradient yet"
        states = set().union(*(seen[step][2] for seen, _ in ranks))
        assert states == ({"weight"} if step and not keep_state else {"weight", "bias"})
    for _, bias in ranks:
        assert bool((bias == 2**-12).all()), "one step of size one, then none"
