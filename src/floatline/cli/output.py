"""What every subcommand says the same way: the --format option, JSON on stdout, people's text by rich."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


class OutputFormat(str, Enum):
    """How a command reports."""

    text = "text"
    json = "json"


FormatOption = Annotated[
    OutputFormat, typer.Option("--format", help="text for people, json for programs (one object on stdout).")
]


def text_console() -> Console:
    """Where text for people goes: stdout, coloured only on a terminal."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_json(result: dict[str, Any]) -> None:
    """Write one JSON object to stdout; NaN and infinity become strings, so that every parser reads it."""
    text = json.dumps(_plain(result), indent=2, ensure_ascii=False, allow_nan=False)
    # Half of a pair of UTF-16, which a JSON file may hold, has no UTF-8; so written it is JSON's own escape.
    typer.echo(text.encode("utf-8", errors="backslashreplace").decode("utf-8"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
