"""What the generated parts of a page share: tables, and what a cluster was."""

from __future__ import annotations

from typing import Any

__all__ = ["setup_line", "table", "where"]


def where(setup: dict[str, Any]) -> str:
    """Hosts, ranks and GPUs, as a heading."""
    hosts = f"{setup['hosts']} host{'s' * (setup['hosts'] > 1)} × {setup['ranks_per_host']} ranks"
    return f"{hosts}, {setup['gpus']} GPUs" if setup["gpus"] else f"{hosts}, no GPU"


def setup_line(setup: dict[str, Any]) -> str:
    """Device, network and versions, and of how many runs."""
    told = [setup["device"]]
    if setup["hosts"] > 1 and "network" in setup:
        told.append(f"between hosts: {setup['network']}")
    told.append(", ".join(f"{name} {version}" for name, version in setup["versions"].items()))
    if "races" in setup:
        told.append("one run" if setup["races"] == 1 else f"{setup['races']} runs")
    return "; ".join(told) + "."


def table(columns: dict[str, list[str]]) -> list[str]:
    """Lines of a table, from its columns by title."""
    lines = [list(columns), ["---"] * len(columns), *(list(row) for row in zip(*columns.values(), strict=True))]
    return [f"| {' | '.join(cells)} |" for cells in lines]
