"""A network is measured once between the same ranks, whatever the state of the cache."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_paro.collectives import ProcessGroups
from lightning_paro.planner import Probe, Sample, _cache, cached_probe
from lightning_paro.topology import Topology
from tests.distributed.pool import WORLD_SIZE, Pool


def _ask(cache: str, group_size: int = 2, environment: dict[str, str] | None = None, fresh: bool = False) -> Any:
    """What is returned, how often this rank measured, and its warnings. Each measurement is another one."""
    groups = ProcessGroups.create(Topology(WORLD_SIZE, group_size))
    runs = len(list(Path(cache).rglob("*.json")))
    samples = (Sample("inside", "gather", 64, 0.1 * runs, 1e9 + runs), Sample("inside", "reduce", 64, 1 / 3, 2e9))
    with (
        mock.patch.object(_cache, "probe", return_value=Probe(groups.topology, "cpu", samples)) as measured,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache} | (environment or {})),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = cached_probe(groups, fresh=fresh)
    return found, measured.call_count, [str(warning.message) for warning in caught]


def _all(pool: Pool, *args: Any, **kwargs: Any) -> tuple[Probe, int, list[str]]:
    """The answer, which must be the same on all ranks; only rank 0 touches the cache, and warns."""
    results = pool.run(_ask, *args, **kwargs)
    assert all(result[:2] == results[0][:2] for result in results)
    assert not any(result[2] for result in results[1:])
    return results[0]


def _files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.*"))


def test_it_is_measured_once_for_each_topology(pool: Pool, tmp_path: Path) -> None:
    first, calls, _ = _all(pool, str(tmp_path))
    assert calls == 1
    (file,) = _files(tmp_path)
    assert file.parent == tmp_path / "lightning_paro"
    key = json.loads(file.read_text())["key"]
    assert (len(key["hosts"]), key["device"], key["group_size"], key["backend"]) == (WORLD_SIZE, "cpu", 2, "gloo")
    assert _all(pool, str(tmp_path)) == (first, 0, [])

    other, calls, _ = _all(pool, str(tmp_path), group_size=1)
    assert calls == 1
    assert other != first
    posed, calls, _ = _all(pool, str(tmp_path), environment={"NCCL_HOSTID": "elsewhere"})
    assert calls == 1
    assert len(_files(tmp_path)) == 3
    assert _all(pool, str(tmp_path)) == (first, 0, [])
    assert _all(pool, str(tmp_path), environment={"NCCL_HOSTID": "elsewhere"}) == (posed, 0, [])


def test_another_way_through_the_network_is_measured_anew(pool: Pool, tmp_path: Path) -> None:
    first, _, _ = _all(pool, str(tmp_path))
    assert _all(pool, str(tmp_path), environment={"NCCL_DEBUG": "INFO"}) == (first, 0, [])
    for setting in ({"NCCL_IB_DISABLE": "1"}, {"GLOO_SOCKET_IFNAME": "eth7"}):
        assert _all(pool, str(tmp_path), environment=setting)[1] == 1


def test_fresh_measures_again_and_is_kept(pool: Pool, tmp_path: Path) -> None:
    first, _, _ = _all(pool, str(tmp_path))
    second, calls, _ = _all(pool, str(tmp_path), fresh=True)
    assert calls == 1
    assert second != first
    assert _all(pool, str(tmp_path)) == (second, 0, [])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"key": {}, "probe": {}}', "key only", "\x00\xff"],
)
def test_a_file_that_makes_no_sense_is_replaced_with_a_warning(pool: Pool, tmp_path: Path, content: str) -> None:
    _all(pool, str(tmp_path))
    (file,) = _files(tmp_path)
    if content == "key only":
        content = json.dumps({"key": json.loads(file.read_text())["key"], "probe": {"samples": [{"links": 1}]}})
    file.write_bytes(content.encode("latin-1"))
    measured, calls, said = _all(pool, str(tmp_path))
    assert calls == 1
    assert len(said) == 1
    assert f"the measured network in {file} cannot be used" in said[0]
    assert _all(pool, str(tmp_path)) == (measured, 0, [])


def test_a_folder_that_cannot_be_written_is_only_a_warning(pool: Pool, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    measured, calls, said = _all(pool, str(blocked))
    assert calls == 1
    assert measured.samples[0].bandwidth == 1e9
    assert ["cannot be kept in" in line for line in said][-1]


def _one_rank(cache: str) -> Probe:
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
        return cached_probe(ProcessGroups.create(Topology(1, 1)))


def test_one_rank_has_no_network(tmp_path: Path) -> None:
    assert _one_rank(str(tmp_path)).samples == ()
    assert not _files(tmp_path)
