"""`floatline run`: a training script as it is, under a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.endings import say_ended
from floatline.cli.output import COMMAND, AsDevice


def run(
    context: typer.Context,
    command: Annotated[
        str, typer.Argument(metavar="-- COMMAND", help="-- python train.py ARGUMENTS, or -- torchrun OPTIONS train.py.")
    ],
    plan: Annotated[str, typer.Option("--plan", metavar="PLAN", help="What to train in: a plan's name or YAML file.")],
    as_device: Annotated[
        AsDevice | None,
        typer.Option("--as", help="Run a script written for a GPU on a CPU, computing as the GPU would."),
    ] = None,
) -> None:
    """Run a training script under a plan, without an edit.

    Its modules compute in the plan's format, its loss is scaled where the plan says so, and its own GradScaler does
    nothing; modules, functions and lines that the plan names compute in FP32. A script that uses autocast itself
    decides where 16 bits are used. The exit code is the script's own; 2 means that the plan could not be put into
    force.
    """
    import json

    from floatline.plans.presets import resolve_plan
    from floatline.running.command import parse_launched, run_to_end

    if COMMAND not in context.meta:
        raise typer.BadParameter(f"'{command}' stands where the command belongs. Give it after --: -- python train.py.")
    parsed = parse_launched(context.meta[COMMAND])
    job = {"plan": resolve_plan(plan).as_given(), "device": "" if as_device is None else as_device.value}
    code = run_to_end(parsed.inside("floatline.running.main", "", json.dumps(job)), keep_stdout=False)
    say_ended(code, "What the script saved is its own; the same command runs it again.")
    if code:
        raise typer.Exit(code)
