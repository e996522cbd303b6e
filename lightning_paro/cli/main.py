"""``lightning-paro``: the package's own verbs, and LightningCLI with the package imported for all others."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable

from jsonargparse import ArgumentParser, auto_cli
from lightning.pytorch.cli import LightningCLI

import lightning_paro  # noqa: F401 - registers the strategies
from lightning_paro.cli.lisa_memory import lisa_memory
from lightning_paro.cli.plan import plan
from lightning_paro.cli.probe import probe
from lightning_paro.cli.supar import VERBS as SUPAR

__all__ = ["main"]

Verb = Callable[..., None] | dict[str, Callable[..., None]]
"""A function whose arguments are the options, or several of them by name."""

ABOUT = (
    "Lightning's subcommands, with the paro strategies known, and four of our own: plan, which computes the partition "
    "to take, probe, which measures the network, lisa-memory, which computes what LISA takes, and supar, which sees "
    "whether hyperparameters carry over. See lightning-paro plan --help, and so on."
)
VERBS: dict[str, Verb] = {
    "plan": plan, "probe": probe, "lisa-memory": lisa_memory, "supar": SUPAR,
}  # fmt: skip


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
            _call(verb, sys.argv[2:], f"lightning-paro {sys.argv[1]}")
        except (ValueError, OSError, ImportError) as error:  # of what was asked: no traceback
            sys.exit(f"lightning-paro {sys.argv[1]}: {error}")


def _call(verb: Verb, arguments: list[str], prog: str) -> None:
    if (
        callable(verb) and "config" in inspect.signature(verb).parameters
    ):  # auto_cli has an option of this name, for a file of options
        parser = ArgumentParser(prog=prog, description=(verb.__doc__ or "").partition("\n")[0])
        parser.add_function_arguments(verb, as_group=False, as_positional=False)
        verb(**parser.parse_args(arguments).as_dict())
    else:
        auto_cli(verb, args=arguments, as_positional=False, prog=prog)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
