"""What LISA sends and holds under ParoStrategy, to the byte: PaRO's formulas with what is trained now in place of all.

Collectives are counted at torch's process groups, and tensors by the garbage collector, as in test_bytes.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_paro import ParoStrategy, state_access
from tests.distributed.lisa import batches, train
from tests.distributed.lisa_bytes import (
    INNER,
    INTERVAL,
    MICRO_BATCHES,
    PARTS,
    PERIODS,
    SIZE,
    STEPS,
    Uneven,
    by_period,
    gradients,
    held,
    sent,
)  # fmt: skip
from tests.distributed.pool import WORLD_SIZE, Pool
from tests.distributed.test_bytes import Recorder, _alive, recording


class Count(Callback):
    """Counts what each step sends, and what is sent between steps, where LISA switches; it comes after LISA."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.steps: list[tuple[int, int]] = []
        """Bytes inside the group and between groups."""
        self.others: list[int] = []
        """Bytes through communicators of nobody's."""
        self.switches: list[tuple[int, int]] = []
        """Bytes that a switch sent through the engine's groups, and through that of the whole world."""
        self._before: dict[Any, int] = {}

    def _moved(self) -> dict[Any, int]:
        """Bytes by group since the last call."""
        now = dict(self.recorder.bytes)
        moved = {group: nbytes - self._before.get(group, 0) for group, nbytes in now.items()}
        self._before = now
        return moved

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index % MICRO_BATCHES == 0:
            moved = self._moved()
            world = moved.pop(torch.distributed.group.WORLD, 0)
            if self.steps:  # before the first, ranks talk about data and the model
                self.switches.append((sum(moved.values()), world))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % MICRO_BATCHES == 0:
            engine = trainer.strategy.engine
            engine.settle()
            moved, groups = self._moved(), engine.groups
            inside = moved.pop(groups.intra_gather, 0) + moved.pop(groups.intra_reduce, 0)
            self.steps.append((inside, moved.pop(groups.inter, 0)))
            moved.pop(groups.control)
            self.others.append(sum(moved.values()))


class Watch(Count):
    """Compares what is held with what is expected."""

    def __init__(self, recorder: Recorder, width: int, policy: str, keep_master: bool) -> None:
        super().__init__(recorder)
        self.width = width
        self.keeps, self.keep_master = policy in ("keep", "offload"), keep_master
        self.wrong: list[str] = []
        self._stateful: set[int] = set()

    def check(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"after {len(self.steps)} steps, {what}: {found}, expected {expected}")

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        engine, active = trainer.strategy.engine, PERIODS[len(self.steps) // INTERVAL]
        expected = gradients(str(engine.partition)[2], active)
        self.check("gradients before the optimizer", engine.held_bytes()["gradients"], expected)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        engine, active = trainer.strategy.engine, PERIODS[len(self.steps) // INTERVAL]
        partition = str(engine.partition)
        is_first = not self.steps
        super().on_train_batch_end(trainer, module, outputs, batch, index)
        if (index + 1) % MICRO_BATCHES:
            expected = gradients(partition[1], active)
            self.check("accumulated gradients", engine.held_bytes()["gradients"], expected)
            return
        self.check("sent", self.steps[-1], sent(partition, active, self.width, is_first))
        self._stateful = {*active, *(self._stateful if self.keeps else ())}
        holds = held(partition, engine.groups.rank, active, self._stateful, self.width, self.keep_master)
        self.check("held", engine.held_bytes(), holds)
        state = state_access(trainer).optimizer_state(module).values()
        sizes = [value.nbytes for entry in state for key, value in entry.items() if key != "step"]
        self.check("state", sum(sizes), holds["optimizer"])
        if len(self.steps) % INTERVAL == 0:
            expected = sum(holds.values()) + DATA
            alive = sum(_alive().values())
            for _ in range(0 if self.wrong else 100):  # a thread of gloo may hold its last tensors a moment longer
                if alive <= expected + SMALL:
                    break
                time.sleep(0.02)
                alive = sum(_alive().values())
            self.check(f"{alive} bytes alive, within {SMALL} of {expected}", 0 <= alive - expected <= SMALL, True)


DATA = sum(batch.nbytes for batch in batches(STEPS * MICRO_BATCHES))
SMALL = 24 * len(list(Uneven().parameters()))
"""Step counters and stand-ins for gradients: a few numbers a parameter."""


def fit(partition: str, watching: Count, precision: str = "32-true", **options: Any) -> tuple[Any, Any, Any]:
    options = {"sampler": by_period, "interval": INTERVAL, **options}
    return train(
        ParoStrategy(partition, group_size=SIZE), WORLD_SIZE, steps=STEPS, accumulate=MICRO_BATCHES, clip=None,
        precision=precision, callbacks=[watching], build=Uneven, **options,
    )  # fmt: skip


def _differing(partitions: tuple[str, ...], precision: str, state_policy: str, keep_master: bool) -> list[str]:
    gc.collect()
    gc.freeze()  # what is there by now need not be walked again and again
    found = []
    try:
        for partition in partitions:
            with recording() as recorder:
                watch = Watch(recorder, 4 if precision == "32-true" else 2, state_policy, keep_master)
                fit(partition, watch, precision, state_policy=state_policy, keep_master=keep_master)
            assert len(watch.steps) == STEPS
            watch.check("sent elsewhere", watch.others, [0] * STEPS)
            watch.check("sent by switches", {between for between, _ in watch.switches}, {0})
            found += [f"{partition}: {text}" for text in watch.wrong]
    finally:
        gc.unfreeze()
    return found


def _check(pool: Pool, *args: Any) -> None:
    for rank, wrong in enumerate(pool.run(_differing, *args)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("precision", [pytest.param("32-true", marks=pytest.mark.full), "bf16-mixed"])
def test_traffic_and_memory_are_those_of_what_is_trained(pool: Pool, some: tuple[str, ...], precision: str) -> None:
    _check(pool, some, precision, "drop_frozen", False)


@pytest.mark.parametrize(
    ("precision", "policy", "keep_master"),
    [
        ("bf16-mixed", "keep", True),
        pytest.param("bf16-mixed", "drop_frozen", True, marks=pytest.mark.full),
        pytest.param("bf16-mixed", "reset_all", False, marks=pytest.mark.full),
        pytest.param("32-true", "offload", False, marks=pytest.mark.full),
    ],
)
def test_what_is_kept_on_purpose_is_all_that_is_kept(
    pool: Pool, few: tuple[str, ...], precision: str, policy: str, keep_master: bool
) -> None:
    _check(pool, few, precision, policy, keep_master)


def _counted(partition: str, **options: Any) -> tuple[Count, list[tuple[int, int, tuple[int, ...]]]]:
    with recording() as recorder:
        count = Count(recorder)
        _, _, lisa = fit(partition, count, **options)
    count.recorder, count._before = Recorder(), {}  # process groups are this rank's own
    return count, lisa.periods


@pytest.mark.parametrize("sampler", ["uniform", "cyclic"])
def test_a_switch_sends_nothing(pool: Pool, sampler: str) -> None:
    """Not even to draw: every rank knows what the others draw."""
    for count, periods in pool.run(_counted, "ggg", sampler=sampler, interval=1):
        assert count.switches == [(0, 0)] * (STEPS - 1)
        layers = [active for _, _, active in periods]
        assert len(set(layers)) > 3
        assert count.steps == [sent("ggg", active, is_first=not step) for step, active in enumerate(layers)]


def test_a_sampler_of_the_users_own_is_asked_on_one_rank(pool: Pool) -> None:
    """Its answer is told to the others, once a period; through nothing of the engine's."""
    for count, _ in pool.run(_counted, "iig"):
        told = [world for _, world in count.switches]
        assert {between for between, _ in count.switches} == {0}
        assert [bool(nbytes) for nbytes in told] == [step % INTERVAL == 0 for step in range(1, STEPS)]
        assert max(told) < 1000


@pytest.mark.parametrize("partition", ["iii", "ggg"])
def test_below_what_is_trained_nothing_is_gathered_for_a_backward(pool: Pool, partition: str) -> None:
    """Where embeddings are frozen. The first micro-batch of a period may have gathered layers ahead in vain."""
    lowest = [min(active) for active in PERIODS for _ in range(INTERVAL)]
    expected = [
        sent(partition, PERIODS[step // INTERVAL], 4, not step, low, before)
        for step, (low, before) in enumerate(zip(lowest, [lowest[0], *lowest], strict=False))
    ]
    for count, _ in pool.run(_counted, partition, train_embeddings="never"):
        assert count.steps == expected


# ---- parameters that some ranks have nothing of ---------------------------------------------------------------


class Parts(Callback):
    """After every period: this rank's elements of optimizer state, by parameter, and which layers have masters."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, int], set[str]]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % (MICRO_BATCHES * INTERVAL) == 0:
            state = state_access(trainer).optimizer_state(module)
            engine = trainer.strategy.engine
            mastered = {flat.unit for flat in engine.flats if flat.is_mastered}
            self.seen.append(({name: entry["exp_avg"].numel() for name, entry in state.items()}, mastered))


def _parts(partition: str) -> Any:
    parts = Parts()
    _, module, _ = fit(partition, parts, "bf16-mixed")  # type: ignore[arg-type]
    return parts.seen, [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("partition", ["nnn", "iii", "iig", "ggg"])
def test_ranks_without_a_part_of_a_parameter_freeze_and_train_it_with_the_others(pool: Pool, partition: str) -> None:
    ranks = pool.run(_parts, partition)
    sizes = {name: parameter.numel() for name, parameter in Uneven().named_parameters()}
    replicas = WORLD_SIZE // PARTS[partition[2]]
    is_missing = False
    for period, active in enumerate(PERIODS):
        layers = {f"layers.{number}" for number in active}
        trained = {n: s for n, s in sizes.items() if "layers" not in n or ".".join(n.split(".")[:2]) in layers}
        found = [seen[period] for seen, _ in ranks]
        together = {name: sum(state.get(name, 0) for state, _ in found) for name in sizes}
        assert together == {name: replicas * trained.get(name, 0) for name in sizes}
        assert all(mastered == {"rest", *layers} for _, mastered in found)
        is_missing |= any(name not in state for name in trained for state, _ in found)
    assert is_missing == (partition[2] != "n")
    for _, values in ranks[1:]:
        assert all(map(torch.equal, values, ranks[0][1]))


# ---- what shares a unit with what is trained ------------------------------------------------------------------


def _ends_sampled(partition: str) -> Any:
    strategy, devices = ("auto", 1) if not partition else (ParoStrategy(partition, group_size=SIZE), WORLD_SIZE)
    ends = {"train_embeddings": "sampled", "train_head": "sampled"}
    _, module, lisa = train(strategy, devices, steps=12, build=Uneven, sampler="cyclic", interval=2, **ends)
    return [parameter.detach() for parameter in module.parameters()], lisa.periods


@pytest.mark.parametrize("partition", ["iig", "ggg"])
def test_an_embedding_that_goes_to_sleep_forgets_as_in_one_process(pool: Pool, partition: str) -> None:
    """It lies in one flat buffer with a norm that is always trained."""
    truth, periods = _ends_sampled("")
    embeddings, head = len(INNER), len(INNER) + 1
    for number in (embeddings, head):
        assert sum(number in active for _, _, active in periods) > 1
        assert any(number not in active for _, _, active in periods)
    for values, drawn in pool.run(_ends_sampled, partition):
        assert drawn == periods
        for value, expected in zip(values, truth, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
