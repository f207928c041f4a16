"""Where the runs of a command are made: on this machine, or on a Ray cluster."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Engine(str, Enum):
    """Where runs are made."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    Engine, typer.Option("--engine", help="Where the runs are made: this machine, or a Ray cluster.")
]
