"""The two texts of the learning runs, as bytes: the language reference, and source files, both of the standard library.

They differ as pre-training and fine-tuning do: prose about Python, then Python. Nothing is downloaded; which bytes they
are depends on the version of the interpreter alone.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["batches", "sources", "topics", "windows"]


def topics() -> Tensor:
    """Text A: all topics of ``pydoc``, in the order of their names, shape ``(bytes,)``."""
    from pydoc_data.topics import topics as by_name

    return _bytes("\n".join(by_name[name] for name in sorted(by_name)).encode())


def sources() -> tuple[Tensor, Tensor]:
    """Text B: the files ``*.py`` in the folder of the standard library, without its packages.

    Returns:
        What is trained on, and the tenth of the files that is held out, by a hash of their names, each ``(bytes,)``.
    """
    train, held_out = bytearray(), bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        (train if zlib.crc32(path.name.encode()) % 10 else held_out).extend(path.read_bytes())
    return _bytes(train), _bytes(held_out)


def batches(text: Tensor, steps: int, size: int, length: int, seed: int) -> Tensor:
    """Random pieces of a text, the same for a seed whoever learns them, ``(steps, size, length)``."""
    starts = torch.randint(len(text) - length + 1, (steps, size), generator=torch.Generator().manual_seed(seed))
    return text[starts[..., None] + torch.arange(length)].long()


def windows(text: Tensor, count: int, length: int) -> Tensor:
    """Pieces that are spread evenly over a text and do not overlap, ``(count, length)``.

    Raises:
        ValueError: If the text is too short for that many.
    """
    stride = len(text) // count
    if stride < length:
        raise ValueError(
            f"a text of {len(text)} bytes does not hold {count} windows of {length} bytes. HINT: ask for at most "
            f"{len(text) // length}."
        )
    return text[: count * stride].view(count, stride)[:, :length].long()


def _bytes(text: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
