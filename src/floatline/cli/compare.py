"""`floatline compare`: the verdict on runs that are done."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OutputFormat, print_json, text_console


class ScaleName(str, Enum):
    """How two values of a metric are compared."""

    log = "log"
    log_error = "log-error"
    difference = "difference"


def compare(
    baseline: Annotated[str, typer.Argument(metavar="A", help="Runs in FP32: a run, or a folder of runs.")],
    candidate: Annotated[str, typer.Argument(metavar="B", help="Runs in the other precision.")],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="The metric to compare. The default is the study's metric, or the loss in ledgers.",
        ),
    ] = None,
    higher_is_better: Annotated[
        bool | None,
        typer.Option(
            "--higher-is-better/--lower-is-better", help="Whether higher or lower values of the metric are better."
        ),
    ] = None,
    margin: Annotated[
        tuple[float, float] | None,
        typer.Option(
            "--margin", metavar="PASS FAIL", help="B passes if it is worse by at most PASS, and fails from FAIL on."
        ),
    ] = None,
    scale: Annotated[
        ScaleName | None,
        typer.Option(
            "--scale",
            help="Compare logs of the metric (log), logs of 1 - metric (log-error), or differences. The default: log.",
        ),
    ] = None,
    resolution: Annotated[
        float | None,
        typer.Option(
            "--resolution",
            metavar="STEP",
            help="The step in which the metric moves, such as 1 / items. The default: what its values show.",
        ),
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Compare finished runs: up to 1 % worse is a PASS, 2 % worse or more a FAIL, with error control.

    Runs are paired by seed where both sides have the same seeds. Exit code 0 means PASS, 1 any other verdict.
    """
    from floatline.validation.finished import compare as compare_runs

    result = compare_runs(
        baseline,
        candidate,
        metric=metric,
        higher_is_better=higher_is_better,
        margins=margin or None,  # typer gives an empty tuple where nothing was said
        scale=None if scale is None else scale.value,
        resolution=resolution,
    )
    if output is OutputFormat.json:
        print_json(result.as_json())
    else:
        from rich.text import Text

        lines = [str(result), *(f"  note: {note}" for note in result.notes)]
        text_console().print(Text("\n".join(lines)), soft_wrap=True)
    if result.verdict != "PASS":
        raise typer.Exit(1)
