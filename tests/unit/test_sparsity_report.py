"""What SparsityReport prints can be read on any terminal."""

from __future__ import annotations

import io

from rich.console import Console

from lightning_paro.callbacks.sparsity_report import _table


def test_names_are_never_cut() -> None:
    names = [
        f"model.transformer.h.{layer}.{part}.weight" for layer in (0, 11) for part in ("attn.c_attn", "mlp.c_proj")
    ]
    row = {"shape": (3072, 768), "density": 0.125, "nonzero": 0.125, "weights_per_output": 96.0, "cut_off": 0}
    console = Console(width=80, file=io.StringIO())
    console.print(_table([{"tensor": name, **row} for name in names], "at the start"))
    lines = [line.split("│") for line in console.file.getvalue().splitlines() if line.startswith("│")]  # type: ignore[attr-defined]
    assert "".join(cells[1].strip() for cells in lines) == "".join(names)
    assert [cell.strip() for cell in lines[0][2:-1]] == ["3072 × 768", "12.5000%", "12.5000%", "96.0", "0"]
