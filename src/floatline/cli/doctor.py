"""`floatline doctor`: what this machine has, what to use on it and why, and what a target would do there."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.output import FormatOption, OptionalTarget, OutputFormat, print_json, show_waiting, text_console


def doctor(
    target: OptionalTarget = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="DEVICE", help="Answer for another device: sm_75, T4, mi300x, cpu."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="PLAN", help="Judge this plan: a name or a YAML file.")
    ] = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say what this machine has, which precision to use on it, and why.

    With a target, also check its model: what would break, memory by part under each plan, and why it is not
    lower or faster. Exit code 1 means that something would break.
    """
    import contextlib
    import sys

    from floatline.checkup import examine
    from floatline.plans.presets import resolve_plan
    from floatline.workload import load_target

    asked = resolve_plan(plan) if plan is not None else None
    # What the target prints is not the report.
    with contextlib.redirect_stdout(sys.stderr), show_waiting("looking at the machine, and at the target's first step"):
        loaded = load_target(target) if target is not None else None
        checkup = examine(loaded, on=on, plan=asked)
    if output is OutputFormat.json:
        print_json(checkup.as_json())
    else:
        from floatline.report.doctor import print_checkup

        print_checkup(checkup, text_console())
    if checkup.findings:
        raise typer.Exit(1)
