"""The `floatline` command: gathers the subcommands, turns errors into one line and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
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
    fit,
    fold,
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
    version,
    watch,
)
from floatline.cli.help import AllCommands, PlainCommand
from floatline.cli.output import TargetOrCommand
from floatline.errors import FloatlineError

# The finalizer is over by then, or a few of them.
_LATER = 0.05


def hear_interrupts() -> None:
    """Raise KeyboardInterrupt again where Python dropped it, and not while numpy is imported.

    What is raised inside `__del__` or the callback of a weak reference ends there, with a note on stderr. A recorded
    step leaves many tensors behind, each with a finalizer: of 48 Ctrl-C right after a diagnosis, 2 fell into those.
    torch drops what is raised while it imports numpy, and goes on with the half of it.
    """
    before = sys.unraisablehook

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _interrupt_later()
        else:
            before(dropped)

    sys.unraisablehook = hear
    mine = threading.current_thread() is threading.main_thread()  # Python lets no other have handlers
    if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt_later() -> None:
    again = threading.Timer(_LATER, os.kill, (os.getpid(), getattr(signal, "CTRL_C_EVENT", signal.SIGINT)))
    again.daemon = True
    again.start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _runs_module(frame, "numpy"):
        _interrupt_later()
    else:
        signal.default_int_handler(number, frame)


def _runs_module(frame: FrameType | None, name: str) -> bool:
    """Whether a module is being imported there."""
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] == name):
        frame = frame.f_back
    return frame is not None


_LONGEST_LINE = 3000

GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start: find and fix what breaks": (
        diagnose.diagnose,
        rescue.rescue,
        lint.lint,
        explain.explain,
        doctor.doctor,
        manifest.manifest,
        replay.replay,
    ),
    "Run: train under a plan, and look at it": (run.run, train.train, watch.watch, report.report),
    "Forward only: checkpoints born in BF16 that must run in FP16": (fold.fold, fit.fit),
    "Prove: hold it against FP32": (validate.validate, compare.compare, parity.parity),
    "Sign off: keep the plan that passed": (approve.approve, status.status, rollback.rollback),
    "About": (version.version,),
}
"""All commands, in the order of the help: by what one wants, what is wanted first comes first."""

_TAKE_A_SCRIPT = (diagnose.diagnose, rescue.rescue, manifest.manifest, run.run, validate.validate)

app = typer.Typer(
    name="floatline",
    cls=AllCommands,
    help="Take PyTorch training from FP32 to 16 bits and keep FP32's results.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
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


for _title, _functions in GROUPS.items():
    for _function in _functions:
        _kind = TargetOrCommand if _function in _TAKE_A_SCRIPT else PlainCommand
        app.command(cls=_kind, rich_help_panel=_title)(_function)


def main() -> None:
    """Run the command line, and leave with its exit code."""
    hear_interrupts()
    try:
        code = app(prog_name="floatline", standalone_mode=False)
    except FloatlineError as error:
        code = _complain(str(error))
    except Exception as error:
        words = _say_use(error) or _say_package(error) or explain_missing(error)
        if words is None:
            raise
        code = _complain(words)
    finally:
        # Another thread has set no handler, and may not.
        if signal.getsignal(signal.SIGINT) is _interrupt and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(code if isinstance(code, int) else 0)


def _say_use(error: Exception) -> str | None:
    """What is wrong with the words that were typed, and whose help to read; None for another error."""
    # typer carries its own copy of click, so a wrong use is known by what it can do, not by its class.
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    path = "floatline" if context is None else context.command_path
    words = message().removeprefix("Invalid value: ").rstrip(".")
    return f"{words}{'' if words.endswith('?') else '.'} Try '{path} -h'."


_EXTRAS = {"accelerate": "hf", "peft": "hf", "transformers": "hf", "lightning": "lightning"}


def _say_package(error: Exception) -> str | None:
    """That torch is missing, or what is used with it, and what brings it; None for another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name in _EXTRAS and find_spec("torch") is not None:
        return f"This needs {name}, which is not installed here: pip install 'floatline[{_EXTRAS[name]}]'."
    if name != "torch" and name not in _EXTRAS:
        return None
    return (
        "This needs torch, which is not installed here. Install the one for your machine "
        "(https://pytorch.org/get-started), or: pip install 'floatline[torch]'."
    )


def _complain(message: str) -> int:
    # Names in files are anyone's: nothing that a terminal would obey, and no page of them.
    line = " ".join(message.split())[:_LONGEST_LINE]
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    typer.echo(f"floatline: {shown}", err=True)
    return 2
