"""What several subcommands share: arguments, options, progress, JSON on stdout, text by rich."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floatline.base.json_values import plain_json
from floatline.cli.help import PlainCommand

if TYPE_CHECKING:
    from rich.console import Console


OptionalTarget = Annotated[
    str | None, typer.Argument(help="What is trained: FILE.py, package.module or package.module:name.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed for building the target and for training.")]
RunStepsOption = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="How many steps the whole run has, for the ETA. The default is in the ledger."),
]


# Where the words after `--` are kept.
COMMAND = "floatline.command"


class AsDevice(str, Enum):
    """What a script is run as on."""

    cuda = "cuda"


AsOption = Annotated[
    AsDevice | None,
    typer.Option("--as", help="Run a script written for a GPU on a CPU, computing as the GPU would. Only with --."),
]


class TargetOrCommand(PlainCommand):
    """Takes the words after `--` as they are: they are a command of the user's, with options of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the words at the first `--`."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[COMMAND] = args[place + 1 :]
            args = [*args[:place], "--", " ".join(args[place + 1 :])]
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter:
            raise
        except Exception as error:
            if COMMAND not in ctx.meta or "extra argument" not in str(error):
                raise
            raise typer.BadParameter("A target and a command after -- are given. Give one of them.", ctx=ctx) from None


class Engine(str, Enum):
    """Where runs are made."""

    local = "local"
    ray = "ray"


EngineOption = Annotated[
    Engine, typer.Option("--engine", help="Where the runs are made: on this machine or on a Ray cluster.")
]


class OutputFormat(str, Enum):
    """How a command reports."""

    text = "text"
    json = "json"


FormatOption = Annotated[
    OutputFormat,
    typer.Option(
        "--format",
        help="Format of the output: text for people, or json for programs, one object on stdout. --json does it.",
    ),
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


def check_writable(file: str) -> None:
    """Refuse a place where the trace cannot be kept now, not after minutes of work."""
    from pathlib import Path

    path = Path(file)
    if path.is_dir():
        raise typer.BadParameter(f"--trace '{file}' is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--trace '{file}': there is no folder '{path.parent}'. Make it first.")


def show_waiting(text: str) -> contextlib.AbstractContextManager[object]:
    """A line on stderr while something is done that is mostly short; only on a terminal."""
    import sys

    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(text))


@contextlib.contextmanager
def show_share(text: str) -> Generator[Callable[[int, int], None]]:
    """How many of all are done, and the time to go, on stderr; only on a terminal."""
    import sys

    if not sys.stderr.isatty():

        def say_nothing(*_: int) -> None:
            pass

        yield say_nothing
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(text), total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextlib.contextmanager
def show_progress() -> Generator[Callable[[str], None]]:
    """What is being done, on stderr: one line that changes on a terminal, elsewhere a line for each stage."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        last = ""

        def log(text: str) -> None:
            nonlocal last
            if text != last:
                typer.echo(f"floatline: {text}", err=True)
            last = text

        yield log
        return
    with console.status(Text("loading the target")) as status:
        yield lambda text: status.update(Text(text))
