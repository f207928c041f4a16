"""What several subcommands share: arguments, options, progress, JSON on stdout, text by rich."""

from __future__ import annotations

import contextlib
import json
import shlex
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


class DiagnoseAs(str, Enum):
    """What a script or a target is diagnosed as on."""

    cuda = "cuda"
    cpu = "cpu"


AsOption = Annotated[
    AsDevice | None,
    typer.Option("--as", help="Run a script written for a GPU on a CPU, computing as the GPU would. Only with --."),
]


class TargetOrCommand(PlainCommand):
    """Takes the words after `--` as they are: they are a command of the user's, with options of its own.

    Settings after a target are kept with it: 'mmgcn:broken learning_rate=0.1'.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the words at the first `--`."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[COMMAND] = args[place + 1 :]
            args = [*args[:place], "--", " ".join(args[place + 1 :])]
        ctx.allow_extra_args = COMMAND not in ctx.meta
        try:
            extra = super().parse_args(ctx, args)
            target = ctx.params.get("target")
            if extra:
                stray = [word for word in extra if "=" not in word or not target]
                if stray:
                    ctx.fail(f"Got unexpected extra argument ({stray[0]})")
                ctx.params["target"] = shlex.join([target, *extra])
            ctx.args = []
            return []
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


class Stages:
    """What is being done, on stderr: on a terminal under a clock that runs, elsewhere a line for each stage.

    Args:
        keeps: Whether lines stay on a terminal; else one line changes.
    """

    def __init__(self, *, keeps: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._keeps, self._last = keeps, ""
        console = Console(stderr=True)
        text = TextColumn("{task.description}", markup=False, table_column=Column())  # wrapped, where it is long
        columns = (SpinnerColumn(), TimeElapsedColumn(), text)
        self._clock = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

    @property
    def is_log(self) -> bool:
        """Whether stderr is no terminal."""
        return self._clock.disable

    def __call__(self, text: str) -> None:
        """What is done from now on: nothing else is written meanwhile."""
        if text == self._last:
            return
        self._last = text
        self._stop()
        if self._keeps or self.is_log:
            typer.echo(f"floatline: {text}", err=True)
        self._clock.add_task("" if self._keeps else text, total=None)
        self._clock.start()

    def aloud(self, text: str) -> None:
        """The same of a script that has the terminal for itself: no clock is drawn into what it prints."""
        self._last = text
        self._stop()
        typer.echo(f"floatline: {text}", err=True)

    def _stop(self) -> None:
        self._clock.stop()
        for task in self._clock.task_ids:
            self._clock.remove_task(task)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


@contextlib.contextmanager
def show_progress() -> Generator[Stages]:
    """What is done with a target, on stderr: one line that changes on a terminal, elsewhere a line for each stage."""
    with Stages(keeps=False) as stages:
        if not stages.is_log:
            stages("loading torch")
        yield stages
