"""The code in the documentation runs: one test a page, its blocks in order, in an empty directory.

* ``python`` blocks share one namespace. One that begins with ``# file: name.py`` is a script instead: it is
  written to that file and run by a process of its own, as whatever Lightning launches has to be.
* ``yaml`` blocks that begin with ``# file: name.yaml`` are written before anything runs.
* ``bash`` blocks under ``<!-- run -->``: their ``lightning-paro`` and ``python -m lightning_paro`` lines run. The rows
  of a table in a ``text`` block that follows are among what they print.
* A block under ``<!-- skip: reason -->`` does not run, and is reported as a skipped test with that reason.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from tests.interpreter import Python

ROOT = Path(__file__).parents[2]
COMMANDS = ("lightning-paro", "python -m lightning_paro")
ENVIRONMENT = dict(os.environ)
CONSOLE_SCRIPT = Path(sys.executable).with_name("lightning-paro")
SECONDS = 120  # for one script or command
FENCE = re.compile(
    r"(?:^ *<!-- *(?P<note>[^\n]+?) *-->\s*\n)?"
    r"^(?P<indent> *)(?P<ticks>`{3,}) *(?P<language>[\w-]*)[^\n`]*\n"
    r"(?P<code>(?:[^\n]*\n)*?)"
    r"(?P=indent)(?P=ticks) *$",
    re.MULTILINE,
)


class Block(NamedTuple):
    language: str
    code: str
    note: str  # what the comment above the fence says
    line: int  # of the code, in the page

    @property
    def file(self) -> str | None:
        named = re.match(r"# file: (\S+)\n", self.code)
        return named[1] if named and self.language in ("python", "yaml") else None

    @property
    def skipped(self) -> str | None:
        return self.note.removeprefix("skip:").strip() if self.note.startswith("skip:") else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=fence["language"],
            code=textwrap.dedent(fence["code"]),
            note=fence["note"] or "",
            line=text.count("\n", 0, fence.start("code")) + 1,
        )
        for fence in FENCE.finditer(text)
    ]


def cases() -> list:
    pages = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]
    found = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]
    for page in pages:
        for block in blocks(page):
            if block.skipped is not None:
                where = f"{page.relative_to(ROOT)}:{block.line}"
                mark = pytest.mark.skip(reason=f"{where}: {block.skipped or 'no reason given'}")
                found.append(pytest.param(page, id=where, marks=mark))
    return found


def run(command: str, where: str) -> str:
    program, *arguments = shlex.split(command)
    log = Path("log")
    arguments = arguments if program == "python" else [str(CONSOLE_SCRIPT), *arguments]
    caches = {"XDG_CACHE_HOME": str(Path.cwd() / "cache")}
    process = Python(arguments, log, environment=ENVIRONMENT | caches)
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{where}: `{command}` ran past {SECONDS} s\n{log.read_text()}")
    finally:
        process.kill()
    assert code == 0, f"{where}: `{command}` exited {code}\n{log.read_text()}"
    return log.read_text()


def rows(text: str) -> set[tuple[str, ...]]:
    """The cells of a table's rows."""
    return {tuple(cell.strip() for cell in line.split("│")) for line in text.splitlines() if line.startswith("│")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", cases())
@mock.patch.dict(os.environ)  # a Trainer leaves its marks there
def test_code_blocks(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    todo = [block for block in blocks(page) if block.skipped is None]
    for block in todo:
        if block.file:
            Path(block.file).write_text(block.code, encoding="utf-8")
    printed = ""
    for block in todo:
        where = f"{page.name}:{block.line}"
        if block.language == "text" and printed:
            assert rows(block.code) <= rows(printed), f"{where}: other rows than those that are printed"
        printed = ""
        if block.language == "python" and block.file:
            run(f"python {block.file}", where)
        elif block.language == "python":
            lines_above = "\n" * (block.line - 1)  # a traceback then names the line in the page
            exec(compile(lines_above + block.code, str(page), "exec"), module.__dict__)
        elif block.language == "bash" and block.note == "run":
            lines = block.code.replace("\\\n", " ").splitlines()
            commands = [line for line in lines if line.startswith(COMMANDS)]
            assert commands, f"{where}: nothing to run here"
            printed = "".join(run(command, where) for command in commands)
