"""The precision table, cell by cell: what a module computes in, what lies in memory, what travels, what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paro.collectives import _compat
from lightning_paro.topology import Granularity
from tests.distributed.pool import Pool
from tests.distributed.precision_table import BF16, FP32, FP64, TABLE, Row, start
from tests.distributed.sessions import Session, Setting


class Watched(nn.Module):
    """32 elements, which four ranks divide without padding. Remembers which dtypes it has met."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3))
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("factor", torch.full((3,), 1 + 2**-12))  # bfloat16 makes it 1
        self.register_buffer("count", torch.tensor(3))
        self.met: set[tuple[str, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.met |= {("parameter", p.dtype) for p in self.parameters()}
        self.met |= {("buffer", self.factor.dtype), ("count", self.count.dtype), ("input", x.dtype)}
        product = nn.functional.linear(x * self.factor, self.weight)
        self.met.add(("output", product.dtype))
        return torch.tanh(product) * self.scale


def watched_loss(module: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([cell(x).square().mean() for cell in module]).sum()


@contextmanager
def recorded() -> Iterator[set[tuple[str, int, torch.dtype]]]:
    """Which dtypes travel, by kind of collective and process group; small agreements beside the tensors apart."""
    seen: set[tuple[str, int, torch.dtype]] = set()
    names = (
        (_compat, "all_gather"),
        (_compat, "reduce_scatter"),
        (_compat, "gather_all"),
        (_compat, "all_to_all"),
        (torch.distributed, "all_reduce"),
    )
    kinds = {"gather_all": "all_gather", "all_to_all": "reduce_scatter"}
    originals = [getattr(where, name) for where, name in names]

    def recording(name: str, original: Any) -> Any:
        def call(out: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            for tensor in out if name == "gather_all" else [out]:
                seen.add((kinds.get(name, name), id(group), tensor.dtype))
            return original(out, *args, group=group, **kwargs)

        return call

    for (where, name), original in zip(names, originals, strict=True):
        setattr(where, name, recording(name, original))
    try:
        yield seen
    finally:
        for (where, name), original in zip(names, originals, strict=True):
            setattr(where, name, original)


def bytes_held(session: Session) -> dict[str, int]:
    """Bytes of all storages that the flats and the optimizers hold, found by walking them; views count once."""
    assert session.engine is not None
    storages: dict[int, int] = {}

    def add(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        new = storage.data_ptr() not in storages and storage.nbytes() > 0
        storages[storage.data_ptr()] = storage.nbytes()
        return storage.nbytes() if new else 0

    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for flat in session.engine.flats:
        kind = "optimizer" if flat.shard is flat.master else "parameters"
        held[kind] += add(flat.shard)
        held["parameters"] += add(flat.whole) if flat.whole is not flat.shard else 0
        held["optimizer"] += add(flat.master)
        for value in (flat.staging, flat.accumulator, flat.gradient):
            held["gradients"] += add(value) if value is not None else 0
        held["gradients"] += sum(
            add(entry.grad) for entry in flat.entries if entry is not None and entry.grad is not None
        )
        held["optimizer"] += sum(add(entry) for entry in flat.entries if entry is not None)
    for shards in session.engine.optimizers:
        for state in shards.optimizer.state.values():
            held["optimizer"] += sum(add(value) for key, value in state.items() if key != "step")
    return held


def _check_row(row: Row, settings: list[Setting]) -> list[str]:
    """What of a row is otherwise in any of the settings."""
    found: list[str] = []

    def expect(what: str, actual: Any, expected: Any) -> None:
        if actual != expected:
            found.append(f"{row.precision} {row.options} {setting}: {what}: {actual} instead of {expected}")

    for setting in settings:
        torch.manual_seed(0)
        session, plugin = start(row, setting, nn.Sequential(Watched(), Watched()), (Watched,))
        engine, groups = session.engine, session.engine.groups
        partition = engine.partition
        optimizer = session.attach(torch.optim.AdamW(session.module.parameters(), lr=0.01))
        divide = engine.topology.divisor
        size = sum(p.numel() for p in session.module.parameters())

        with recorded() as seen:
            for step in range(2):
                for micro in range(2):
                    session.backward(
                        2 * step + micro, watched_loss, sync=micro == 1, context=plugin.forward_context(),
                        dtype=row.parameters if row.precision.endswith("true") else FP32,
                    )  # fmt: skip
                    if micro == 0:
                        expected = size * row.accumulator.itemsize // divide(partition.g)
                        expect("accumulator bytes", bytes_held(session)["gradients"], expected)
                        dtypes = {flat.accumulator.dtype for flat in engine.flats}
                        expect("accumulator", dtypes, {row.accumulator})
                dtypes = {entry.grad.dtype for entry in engine.optimizers[0].entries()}
                expect("gradient of the optimizer", dtypes, {row.master} if dtypes else set())
                expected = size * row.master.itemsize // divide(partition.os)
                expect("gradient bytes at the step", bytes_held(session)["gradients"], expected)
                optimizer.step()
                optimizer.zero_grad()

        inputs = row.parameters if row.precision.endswith("true") else FP32
        expected = {("parameter", row.parameters), ("output", row.outputs), ("buffer", row.buffers)}
        for cell in session.module:
            expect("dtypes in forward", cell.met, expected | {("input", inputs), ("count", torch.int64)})
            expect("a buffer's value", bool((cell.factor > 1).all()), row.buffers is not BF16)

        roles = {id(getattr(groups, role)): role for role in ("intra_gather", "intra_reduce", "inter")}
        legs = {(name, roles[group], dtype) for name, group, dtype in seen if group in roles}
        expect("on the wire", legs, wires(row, str(partition.os)))

        held = bytes_held(session)
        is_cast = row.has_master and partition.p is partition.os is not Granularity.N
        expected = 0 if is_cast else size * row.parameters.itemsize // divide(partition.p)
        expect("bytes of parameters", held["parameters"], expected)
        expect("bytes of gradients after a step", held["gradients"], 0)
        state = (2 + row.has_master) * row.master.itemsize
        expect("bytes of master and Adam", held["optimizer"], size * state // divide(partition.os))
        expected = size * row.accumulator.itemsize // divide(partition.g)
        expect("bytes of the formula", engine.model_state_bytes(), sum(held.values()) + expected)
        dtypes = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
        expect("state of the optimizer", dtypes, {row.master} if dtypes else set())

        own = {"64-true": FP64, "bf16-true": BF16}.get(row.precision, FP32)
        with engine.lent_to_rank_zero() as here:
            dtypes = {p.dtype for p in session.module.parameters()} if here else {own}
        expect("saved parameters", dtypes, {own})
        engine.close()
    return found


def wires(row: Row, os: str) -> set[tuple[str, str, torch.dtype]]:
    """What travels in two groups of two: collective, role of the process group, dtype."""
    legs = {("reduce_scatter", "intra_reduce", row.intra)}  # every gradient starts whole, and no rank keeps all of it
    if os == "g":
        legs |= {("reduce_scatter", "inter", row.inter), ("all_gather", "inter", row.parameters)}
    else:
        legs |= {("all_reduce", "inter", row.inter)}
    # With whole optimizer state no value ever travels, but the gradient comes back to all.
    return legs | {("all_gather", "intra_gather", row.intra if os == "n" else row.parameters)}


@pytest.mark.parametrize(
    "partitions", [("nnn", "iig", "gig"), pytest.param(("nig", "ggg", "iii", "nng"), marks=pytest.mark.full)]
)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join([row.precision, *map("=".join, row.options.items())]))
def test_every_cell_of_the_precision_table(pool: Pool, row: Row, partitions: tuple[str, ...]) -> None:
    for wrong in pool.run(_check_row, row, list(map(Setting, partitions))):
        assert not wrong, "\n".join(wrong)
