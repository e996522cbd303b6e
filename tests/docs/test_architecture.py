"""The table in docs/architecture.md is what the rooms import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_paro"
ROW = re.compile(r"^\| `(?P<room>\w+)` \|.*\| (?P<imports>[^|]+) \|$", re.MULTILINE)
TABLE = {
    row["room"]: set(re.findall(r"`(\w+)`", row["imports"]))
    for row in ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
}


def imported(room: str) -> set[str]:
    """Every module the files of a room import, relative imports aside, which the style forbids."""
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else (PACKAGE / room).rglob("*.py")
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_is_in_the_table() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert rooms == TABLE.keys()


@pytest.mark.parametrize("room", TABLE)
def test_a_room_imports_what_the_table_says(room: str) -> None:
    names = {name.split(".")[1] for name in imported(room) if name.startswith("lightning_paro.")}
    assert names - {room} == TABLE[room]


@pytest.mark.parametrize("room", ["topology", "collectives", "sharding", "planner", "algorithms"])
def test_a_room_of_plain_torch_knows_no_lightning(room: str) -> None:
    lightning = re.compile(r"(lightning|pytorch_lightning|lightning_(?!paro\b)\w+)\b")
    assert not [name for name in imported(room) if lightning.match(name)]
