"""`floatline replay`: the failing step of a bundle, run again as it was and otherwise."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


class Precision(str, Enum):
    """What a step can be replayed in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def replay(
    bundle: Annotated[str, typer.Argument(help="Folder of a replay bundle.")],
    target: Annotated[
        str | None, typer.Option("--target", help="What builds the model, in place of the one the bundle names.")
    ] = None,
    precision: Annotated[Precision | None, typer.Option("--precision", help="Compute the step in it.")] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="Another loss scale.")] = None,
    fp32_module: Annotated[
        list[str] | None,
        typer.Option("--fp32-module", metavar="NAME", help="Compute this module in FP32; may be given again."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="Keep the trace of the replay that is asked for.")
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Run the step of a bundle again: as it was, as asked, and in FP32 to compare with.

    The code of the target is run. Exit code 0 means that the replay that is asked for is finite, 1 that it fails.
    """
    import sys

    if trace is not None:
        _check_writable(trace)
    from floatline.probe.bundles.bundle_replay import replay_bundle

    # What the target prints is not the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = replay_bundle(
            bundle,
            target=target,
            precision=None if precision is None else precision.value,
            scale=scale,
            islands=tuple(fp32_module or ()),
            trace_path=trace,
        )
    if output is OutputFormat.json:
        print_json(report.as_json())
    else:
        from floatline.report.replay import print_replay

        print_replay(report, text_console())
    if not report.finite:
        raise typer.Exit(1)


def _check_writable(file: str) -> None:
    """Refuse a place where the trace cannot be kept before anything is run."""
    from pathlib import Path

    path = Path(file)
    if path.is_dir():
        raise typer.BadParameter(f"--trace '{file}' is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--trace '{file}': there is no folder '{path.parent}'. Make it first.")
