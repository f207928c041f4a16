"""`floatline replay`: the failing step of a bundle, run again as it was and otherwise."""

from __future__ import annotations

import contextlib
from enum import Enum
from typing import Annotated

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import (
    FormatOption,
    OutputFormat,
    check_writable,
    print_json,
    show_progress,
    text_console,
)


class Precision(str, Enum):
    """What a step can be replayed in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def replay(
    bundle: Annotated[str, typer.Argument(help="Folder of a replay bundle.")],
    target: Annotated[
        str | None, typer.Option("--target", help="What builds the model, instead of the target that the bundle names.")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option("--precision", help="Compute the step in this precision.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="Use this loss scale instead of the step's own.")
    ] = None,
    fp32_module: Annotated[
        list[str] | None,
        typer.Option(
            "--fp32-module", metavar="NAME", help="Compute this module in FP32; the option may be given several times."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Write the trace of the requested replay to this file."),
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Run the step of a bundle again: as it was, as asked, and in FP32 to compare with.

    The code of the target is run. Exit code 0 means that the replay that is asked for is finite, 1 that it fails.
    """
    import sys

    if trace is not None:
        check_writable(trace)
    # What the target prints is not the report.
    ended = saying_how_to_go_on("The bundle is as it was: the same command begins again.")
    with ended, contextlib.redirect_stdout(sys.stderr), show_progress() as show:
        from floatline.probe.bundles.bundle_replay import replay_bundle  # with torch, which takes seconds

        report = replay_bundle(
            bundle,
            target=target,
            precision=None if precision is None else precision.value,
            scale=scale,
            islands=tuple(fp32_module or ()),
            trace_path=trace,
            on_progress=show,
        )
    if output is OutputFormat.json:
        print_json(report.as_json())
    else:
        from floatline.report.replay import print_replay

        print_replay(report, text_console())
    if not report.finite:
        raise typer.Exit(1)
