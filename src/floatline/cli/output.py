"""What every subcommand says the same way: the --format option, JSON on stdout, people's text by rich."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatline.base.json_values import plain_json

if TYPE_CHECKING:
    from rich.console import Console


class Engine(str, Enum):
    """Where runs are made."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    Engine, typer.Option("--engine", help="Where the runs are made: this machine, or a Ray cluster.")
]


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
    """Write one JSON object to stdout; NaN and infinity are written as in the ledger, so that every parser reads it."""
    text = json.dumps(plain_json(result), indent=2, ensure_ascii=False, allow_nan=False)
    # Half of a pair of UTF-16, which a JSON file may hold, has no UTF-8; so written it is JSON's own escape.
    typer.echo(text.encode("utf-8", errors="backslashreplace").decode("utf-8"))
