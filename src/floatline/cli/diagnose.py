"""`floatline diagnose`: why training in 16 bits went wrong, where, and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


def diagnose(
    target: Annotated[
        str,
        typer.Argument(help="What is trained: FILE.py, package.module or package.module:name."),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training to look at.")] = 40,
    seed: Annotated[int, typer.Option("--seed", help="Of the target and of the training.")] = 0,
    output: FormatOption = OutputFormat.text,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Keep the trace of the step that was looked at.")
    ] = None,
) -> None:
    """Say why training goes wrong, where, and what to change; or that precision is not to blame.

    The target is trained as it is, replayed in FP32 and BF16, and one step is traced operation by operation.
    Exit code 1 means that something was found, 0 that training is healthy.
    """
    import sys

    if trace is not None:
        _check_writable(trace)
    from floatline.diagnosis.diagnose import diagnose as find_out

    # What the target prints is not the report.
    with contextlib.redirect_stdout(sys.stderr), _progress() as show:
        diagnosis = find_out(target, steps=steps, seed=seed, on_progress=show, trace_path=trace)
    if output is OutputFormat.json:
        print_json(diagnosis.as_json())
    else:
        from floatline.report.diagnosis import print_diagnosis

        print_diagnosis(diagnosis, text_console())
    if diagnosis.findings:
        raise typer.Exit(1)


def _check_writable(file: str) -> None:
    """Refuse a place where the trace cannot be kept now, not after minutes of work."""
    from pathlib import Path

    path = Path(file)
    if path.is_dir():
        raise typer.BadParameter(f"--trace '{file}' is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--trace '{file}': there is no folder '{path.parent}'. Make it first.")


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """A line on stderr that says what is being done; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(Text("loading the target")) as status:
        yield lambda text: status.update(Text(text))
