"""Notebooks: the code of their cells as one file, and the cell and line that each line of it stands in."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from floatline.lint.rule import LintFinding

NOTEBOOK = ".ipynb"


def read_notebook(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The code cells of a notebook, and for each line its cell and its line in it, all counted from 1.

    Lines for the shell and magics do nothing; a cell that is no Python, or in another language, is left out.

    Raises:
        ValueError: It is not a notebook.
    """
    data: Any = json.loads(text)
    cells: Any = data.get("cells") if isinstance(data, dict) else None  # pyright: ignore
    if not isinstance(cells, list):
        raise ValueError("it holds no cells")
    lines: list[str] = []
    places: list[tuple[int, int]] = []
    for number, cell in enumerate(cells, 1):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        source: Any = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else None  # pyright: ignore
        code: Any = "".join(map(str, source)) if isinstance(source, list) else source  # pyright: ignore
        if not isinstance(code, str) or code.startswith("%%"):
            continue
        parsed = _without_magics(code.split("\n"))
        lines += parsed
        places += [(number, line) for line in range(1, len(parsed) + 1)]
    return "\n".join(lines) + "\n", places


def _without_magics(lines: list[str]) -> list[str]:
    """A cell whose lines for the shell and magics do nothing; one that is no Python even so is left blank."""
    found: list[str] = []
    goes_on = False
    for line in lines:
        bare = line.lstrip()
        if goes_on:
            found.append("")
        else:
            is_magic = bare[:1] in ("%", "!", "?")
            found.append(line[: len(line) - len(bare)] + "pass" if is_magic else line)
        goes_on = (goes_on or bare[:1] in ("%", "!")) and line.rstrip().endswith("\\")
    try:
        ast.parse("\n".join(found))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [""] * len(lines)
    return found


def place_in_cells(findings: Iterable[LintFinding], file: str, places: list[tuple[int, int]]) -> list[LintFinding]:
    """Findings with the cell in the name of their file, and the line in it. Nothing rewrites a notebook."""
    placed: list[LintFinding] = []
    for one in findings:
        (cell, line), (_, end) = (places[min(number, len(places)) - 1] for number in (one.line, one.end_line))
        placed.append(replace(one, file=f"{file}:cell {cell}", line=line, end_line=max(end, line), fix=""))
    return placed
