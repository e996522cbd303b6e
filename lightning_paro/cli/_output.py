"""Where what a verb found out goes: the screen, and files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

__all__ = ["console", "make_folders"]


def console(width: int) -> Console:
    """The terminal; into a file or a pipe lines of this width, so that nothing is cut off."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def make_folders(*files: Path | None) -> None:
    """Make the folders of those files that were asked for."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
