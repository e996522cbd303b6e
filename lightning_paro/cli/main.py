"""``lightning-paro``: LightningCLI with the package imported, so that strategy names and class paths resolve."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import LightningCLI

import lightning_paro  # noqa: F401 - registers the strategies

__all__ = ["main"]


def main() -> None:
    """Run LightningCLI; model and data come from the command line or a yaml, by class path.

    Class paths may name modules below the current directory, as with ``python -m``.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    LightningCLI(subclass_mode_model=True, subclass_mode_data=True)


if __name__ == "__main__":
    main()
