"""``lightning-paro``: the package's own verbs, and LightningCLI with the package imported for all others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from jsonargparse import auto_cli
from lightning.pytorch.cli import LightningCLI

import lightning_paro  # noqa: F401 - registers the strategies
from lightning_paro.cli.plan import plan
from lightning_paro.cli.probe import probe

__all__ = ["main"]

ABOUT = (
    "Lightning's subcommands, with the paro strategies known, and two of our own: plan, which computes the partition "
    "to take, and probe, which measures the network. See lightning-paro plan --help and lightning-paro probe --help."
)
VERBS: dict[str, Callable[..., None]] = {"plan": plan, "probe": probe}


def main() -> None:
    """Run one of our verbs, or LightningCLI, whose model and data come from the command line or a yaml, by class path.

    Class paths may name modules below the current directory, as with ``python -m``.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    verb = VERBS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if verb is None:
        LightningCLI(subclass_mode_model=True, subclass_mode_data=True, parser_kwargs={"description": ABOUT})
    else:
        try:
            auto_cli(verb, args=sys.argv[2:], as_positional=False, prog=f"lightning-paro {sys.argv[1]}")
        except (ValueError, OSError, ImportError) as error:  # of what was asked: no traceback
            sys.exit(f"lightning-paro {sys.argv[1]}: {error}")


if __name__ == "__main__":
    main()
