from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks, shared by the whole session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are the same each time, and cores are left to others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A run inside this process sets a launcher's variables, and leaves its process group."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
