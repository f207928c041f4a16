"""The `floatline` command: gathers the subcommands, turns errors into one line and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated

import typer

from floatline import __version__
from floatline.base.private_names import explain_missing
from floatline.cli import (
    approve,
    compare,
    diagnose,
    doctor,
    explain,
    lint,
    manifest,
    parity,
    replay,
    report,
    rescue,
    rollback,
    run,
    status,
    train,
    validate,
    watch,
)
from floatline.cli.output import TargetOrCommand
from floatline.errors import FloatlineError

# The finalizer is over by then, or a few of them.
_LATER = 0.05


def hear_interrupts() -> None:
    """Raise KeyboardInterrupt again where Python dropped it.

    What is raised inside `__del__` or the callback of a weak reference ends there, with a note on stderr. A recorded
    step leaves many tensors behind, each with a finalizer: of 48 Ctrl-C right after a diagnosis, 2 fell into those.
    """
    before = sys.unraisablehook

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        again = threading.Timer(_LATER, os.kill, (os.getpid(), getattr(signal, "CTRL_C_EVENT", signal.SIGINT)))
        again.daemon = True
        again.start()

    sys.unraisablehook = hear


_LONGEST_LINE = 3000

app = typer.Typer(
    name="floatline",
    help="Take PyTorch training from FP32 to 16 bits and keep FP32's results.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"floatline {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(approve.approve)
app.command()(compare.compare)
app.command(cls=TargetOrCommand)(diagnose.diagnose)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(lint.lint)
app.command(cls=TargetOrCommand)(manifest.manifest)
app.command()(parity.parity)
app.command()(replay.replay)
app.command()(report.report)
app.command(cls=TargetOrCommand)(rescue.rescue)
app.command()(rollback.rollback)
app.command(cls=TargetOrCommand)(run.run)
app.command()(status.status)
app.command()(train.train)
app.command(cls=TargetOrCommand)(validate.validate)
app.command()(watch.watch)


def main() -> None:
    """Entry point of the `floatline` script."""
    hear_interrupts()
    try:
        code = app(standalone_mode=False)
    except FloatlineError as error:
        code = _complain(str(error))
    except Exception as error:
        # typer carries its own copy of click, so a wrong use is known by what it can do, not by its class.
        message, missing = getattr(error, "format_message", None), explain_missing(error)
        if message is None and missing is None:
            raise
        if message is None:
            code = _complain(str(missing))
        else:
            # Without arguments the help has been printed already, and the message is empty.
            code = _complain(f"{message()} Try 'floatline --help'.") if message() else 2
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> int:
    # Names in files are anyone's: nothing that a terminal would obey, and no page of them.
    line = " ".join(message.split())[:_LONGEST_LINE]
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    typer.echo(f"floatline: {shown}", err=True)
    return 2
