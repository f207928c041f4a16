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
    world: Annotated[
        int | None,
        typer.Option("--world", metavar="N", help="What one of N processes would hold under FSDP2; with --model."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="SIZE", help="A transformer on paper: 0.1b, 1b, 3b, 7b or 70b.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sequences of one process; with --model.")] = 1,
    sequence: Annotated[int, typer.Option("--sequence", metavar="N", help="Tokens of each; with --model.")] = 4096,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Blocks are computed again in backward; with --model.")
    ] = False,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say what this machine has, which precision to use on it, and why.

    With a target, also check its model: what would break, memory by part under each plan, and why it is not
    lower or faster. Exit code 1 means that something would break. With --model and --world, say what one of
    many processes would hold, move and need at least for a step.
    """
    import contextlib
    import sys

    from floatline.checkup import examine, examine_scale
    from floatline.errors import TargetError
    from floatline.plans.presets import resolve_plan
    from floatline.workload import load_target

    asked = resolve_plan(plan) if plan is not None else None
    if (world is None) != (model is None):
        raise TargetError("--world and --model go together: floatline doctor --model 7b --world 64 --plan bf16-true.")
    if model is not None and target is not None:
        raise TargetError(f"--model {model} and the target '{target}' are two models. Give one of them.")
    # What the target prints is not the report.
    with contextlib.redirect_stdout(sys.stderr), show_waiting("looking at the machine, and at the target's first step"):
        if model is not None and world is not None:
            checkup = examine_scale(
                model, world=world, on=on, plan=asked, batch=batch, sequence=sequence, checkpointing=checkpointing
            )
        else:
            loaded = load_target(target) if target is not None else None
            checkup = examine(loaded, on=on, plan=asked)
    if output is OutputFormat.json:
        print_json(checkup.as_json())
    else:
        from floatline.report.doctor import print_checkup

        print_checkup(checkup, text_console())
    if checkup.findings:
        raise typer.Exit(1)
