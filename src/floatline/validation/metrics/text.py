"""JSON Lines, JSON and CSV, and JSON lines among the other lines of a log."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from floatline.errors import ComparisonError
from floatline.validation.metrics.recorded import STEP_NAMES, Recorded, as_number, as_step, parse_json

LONGEST_LINE = 4 << 20  # characters
LARGEST_JSON = 64 << 20  # bytes of a file that has to be read at once
DEEPEST = 8


def read_json_lines(path: Path, *, strict: bool = True) -> Recorded:
    """One JSON object a line, each a row of metrics.

    Args:
        path: The file.
        strict: False passes over lines that are no JSON object, as in a log or the output of a program.

    Raises:
        ComparisonError: With `strict`, a line that is not a JSON object, except for a last one that is cut off.
    """
    recorded = Recorded(path, "JSON lines")
    with _open(path) as file:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip() or (not strict and not line.lstrip().startswith("{")):
                continue
            row = parse_json(line)
            if isinstance(row, dict):
                _add_row(recorded, cast("dict[str, Any]", row))
            elif strict and line.endswith("\n"):
                raise ComparisonError(f"'{path}' line {number} is not a JSON object. Fix it, or name another file.")
    return recorded


def read_json(path: Path) -> Recorded:
    """One JSON object, or a list of them, each a row of metrics."""
    recorded = Recorded(path, "JSON")
    if path.stat().st_size > LARGEST_JSON:
        raise ComparisonError(f"'{path}' is larger than {LARGEST_JSON >> 20} MiB. Write JSON lines, which may be.")
    with _open(path) as file:
        data = parse_json(file.read())
    rows = cast("list[Any]", data) if isinstance(data, list) else [data]
    for row in rows:
        if not isinstance(row, dict):
            raise ComparisonError(f"'{path}' is neither a JSON object nor a list of them. Name another file.")
        _add_row(recorded, cast("dict[str, Any]", row))
    return recorded


def read_csv(path: Path) -> Recorded:
    """A table with a header, a column for each metric; an empty cell is no value."""
    recorded = Recorded(path, "CSV")
    with _open(path) as file:
        try:
            rows = csv.DictReader(_lines(file), delimiter="\t" if path.suffix == ".tsv" else ",")
            for row in rows:
                _add_row(recorded, {str(name): _cell(cell) for name, cell in row.items() if cell not in (None, "")})
        except csv.Error as error:
            raise ComparisonError(f"'{path}' is not a CSV table: {error}. Fix it, or name another file.") from None
    return recorded


def _cell(text: Any) -> Any:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _add_row(recorded: Recorded, row: dict[str, Any]) -> None:
    flat = dict(_flatten(row))
    step = next((as_step(flat[name]) for name in STEP_NAMES if as_step(flat.get(name)) is not None), None)
    for name, value in flat.items():
        number = as_number(value)
        if name not in STEP_NAMES and number is not None:
            recorded.add(name, step, number)
        if name == "seed" or name.endswith("/seed"):
            recorded.settings.setdefault("seed", value)


def _flatten(row: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict) and depth < DEEPEST:
            yield from _flatten(cast("dict[str, Any]", value), f"{prefix}{name}/", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _lines(file: TextIO) -> Iterator[str]:
    """Lines, those without an end cut into pieces, so that no file fills the memory."""
    while line := file.readline(LONGEST_LINE):
        yield line


def _open(path: Path) -> TextIO:
    # What is not UTF-8 is no metric, and must not hide the lines around it.
    return path.open(encoding="utf-8-sig", errors="replace")
