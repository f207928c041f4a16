"""`floatline validate`: whether a target trains as well in 16 bits as in FP32, faster and smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import (
    COMMAND,
    AsDevice,
    Engine,
    EngineOption,
    FormatOption,
    OutputFormat,
    print_json,
    text_console,
)
from floatline.cli.study_progress import StudyProgress

if TYPE_CHECKING:
    from floatline.validation.result import Validation
    from floatline.validation.running.processes import Runner

# What the options are about, as the help has them.
_WHAT, _LENGTH, _PASS = "What is compared", "How long it is trained", "What counts as a PASS"
_SEEDS, _MORE, _WHERE = "Seeds", "What else is measured", "Where it runs"


def validate(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET [KEY=VALUE]... | -- COMMAND",
            help="What is trained: FILE.py, package.module or package.module:name; NAME[:VARIANT] of a reference "
            "workload, with its settings; or -- python train.py ARGUMENTS.",
        ),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="A candidate: a plan's name or YAML file. Several candidates are ranked.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="COMMAND", help="Train in FP32 by a command with {seed} in it.", rich_help_panel=_WHAT
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="COMMAND",
            help="Train a candidate by a command. Several candidates are ranked.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="The metric by which commands are compared. After --, an expression finds it in what the script "
            "prints, as 'val loss (?P<value>[0-9.]+)'; the default is the loss that goes backward.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    metric_file: Annotated[
        str | None,
        typer.Option(
            "--metric-file",
            metavar="GLOB",
            help="Where the commands write the metric. By default it is searched for.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    cwd: Annotated[
        str | None,
        typer.Option("--cwd", metavar="FOLDER", help="Folder in which the commands run.", rich_help_panel=_WHAT),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps each run takes. The default is one pass or 200, whichever is longer.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", min=1, help="How many passes over the batches each run makes.", rich_help_panel=_LENGTH
        ),
    ] = None,
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="Use only this many batches.", rich_help_panel=_LENGTH)
    ] = None,
    margin: Annotated[
        tuple[float, float],
        typer.Option(
            "--margin",
            help="PASS if worse by at most the first number, FAIL from the second on.",
            rich_help_panel=_PASS,
        ),
    ] = (0.01, 0.02),
    scale: Annotated[
        str,
        typer.Option(
            "--scale", help="How two values are compared: log, log-error or difference.", rich_help_panel=_PASS
        ),
    ] = "log",
    higher_is_better: Annotated[
        bool | None,
        typer.Option(
            "--higher-is-better/--lower-is-better",
            help="Whether higher or lower values of the metric are better. The default is lower.",
            rich_help_panel=_PASS,
        ),
    ] = None,
    language_model: Annotated[
        bool, typer.Option("--language-model", help="The metric is a language model's loss.", rich_help_panel=_PASS)
    ] = False,
    horizon: Annotated[
        int | None,
        typer.Option(
            "--horizon",
            min=1,
            help="How many steps the real training has, for the drift test.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    min_seeds: Annotated[
        int, typer.Option("--min-seeds", min=1, help="The fewest seeds that are run.", rich_help_panel=_SEEDS)
    ] = 3,
    max_seeds: Annotated[
        int, typer.Option("--max-seeds", min=1, help="The most seeds that are run.", rich_help_panel=_SEEDS)
    ] = 20,
    rare: Annotated[
        float | None,
        typer.Option(
            "--rare",
            metavar="SHARE",
            help="Run enough seeds that a PASS rules out this share of bad ones, such as 0.1.",
            rich_help_panel=_SEEDS,
        ),
    ] = None,
    resolution: Annotated[
        float | None,
        typer.Option(
            "--resolution",
            help="The step in which the metric moves, such as 1 / items. The default is what its values show.",
            rich_help_panel=_PASS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The first seed.", rich_help_panel=_SEEDS)] = 0,
    curve: Annotated[
        str | None,
        typer.Option(
            "--curve",
            help="What is compared during training: metric or loss. The default is the metric, where it is cheap.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    broken: Annotated[
        bool,
        typer.Option(
            "--broken/--no-broken",
            help="Also train a candidate that must not pass, up to the first look.",
            rich_help_panel=_MORE,
        ),
    ] = True,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Also measure speed, memory and layers.", rich_help_panel=_MORE),
    ] = True,
    faster: Annotated[
        float | None,
        typer.Option(
            "--faster",
            metavar="TIMES",
            help="A PASS must be this many times as fast as FP32, such as 1.1.",
            rich_help_panel=_PASS,
        ),
    ] = None,
    smaller: Annotated[
        float | None,
        typer.Option(
            "--smaller",
            metavar="SHARE",
            help="A PASS may need this share of FP32's memory, such as 0.9.",
            rich_help_panel=_PASS,
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Folder of the study. The default is floatline-runs/validate/NAME.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the study in the folder.", rich_help_panel=_WHERE)
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            help="How many runs train at the same time. The default is one per GPU, or one for two cores.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds that one run may take.", rich_help_panel=_WHERE)
    ] = None,
    as_device: Annotated[
        AsDevice | None,
        typer.Option(
            "--as",
            help="Run a script written for a GPU on a CPU, computing as the GPU would. Only with --.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    engine: EngineOption = Engine.local,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Prove that 16 bits train as well as FP32 here, and measure what they save.

    The arms are trained from the same start over several seeds, until the interval of their difference decides.
    A command after -- is a script that is run as it is, once in FP32 and once under the plan; {seed} is filled in.
    Exit code 0 is a PASS, 1 any other verdict. Ctrl-C keeps what is finished, and exits with 130; --resume goes on.
    """
    asked: dict[str, Any] = {
        "margins": margin,
        "scale": scale,
        "higher_is_better": higher_is_better,
        "language_model": language_model,
        "horizon": horizon,
        "min_seeds": min_seeds,
        "max_seeds": max_seeds,
        "rare": rare,
        "resolution": resolution,
        "seed": seed,
        "folder": folder,
        "resume": resume,
    }
    commands = {"--baseline": baseline, "--candidate": candidate, "--metric": metric, "--metric-file": metric_file}
    words = context.meta.get(COMMAND)
    if words is not None:
        _check_script_use(
            {
                "--baseline": baseline,
                "--candidate": candidate,
                "--metric-file": metric_file,
                "--cwd": cwd,
                "--epochs": epochs,
                "--batches": batches,
                "--curve": curve,
            }
        )
    else:
        if as_device is not None:
            raise typer.BadParameter(f"--as {as_device.value} is for a script: give its command after --.")
        _check_use(
            target, {name: value for name, value in commands.items() if value}, plan, curve, steps, epochs, batches
        )
    if (faster is not None or smaller is not None) and (target is None or not measure):
        raise typer.BadParameter(
            "--faster and --smaller are about what is measured: give a TARGET, without --no-measure."
        )
    if engine is Engine.ray:
        asked["runner"] = _ray_runner(jobs, timeout)
    else:
        asked |= {"jobs": jobs, "timeout": timeout}
    ended = saying_how_to_go_on("What is finished is kept: go on with --resume.")
    with ended, StudyProgress() as progress:
        if words is not None:
            from floatline.validation.script_study import validate_script

            result = validate_script(
                words,
                plan or ["fp16-mixed"],
                metric=metric or "loss",
                steps=steps,
                device="" if as_device is None else as_device.value,
                watcher=progress,
                **asked,
            )
        elif target is None:
            from floatline.validation.command_study import validate_commands

            result = validate_commands(
                baseline or "",
                candidate or [],
                metric=metric or "",
                metric_file=metric_file,
                cwd=cwd,
                watcher=progress,
                **asked,
            )
        else:
            from floatline.validation.target_study import validate as validate_target

            result = validate_target(
                target,
                plan or ["fp16-mixed"],
                steps=steps,
                epochs=epochs,
                batches=batches,
                curve=cast("Any", curve),
                broken=broken,
                measure=measure,
                faster=faster,
                smaller=smaller,
                watcher=progress,
                **asked,
            )
    report = _write_report(result)
    if output is OutputFormat.json:
        print_json(result.contract(report))
    else:
        _print(result, report)
    if result.verdict != "PASS":
        raise typer.Exit(1)


def _check_script_use(given: dict[str, Any]) -> None:
    """What belongs to a target, or to commands that know their precision themselves, is not for a script."""
    from floatline.errors import ComparisonError

    for name, value in given.items():
        if value is not None and value != []:
            raise ComparisonError(
                f"{name} does not go with a command after --, which runs in this folder. Leave it out."
            )


def _check_use(
    target: str | None, commands: dict[str, Any], plan: list[str] | None, curve: str | None, *limits: int | None
) -> None:
    """A target, or commands; not both, and not what belongs to the other."""
    from floatline.errors import ComparisonError

    if target is None and "--baseline" not in commands:
        raise ComparisonError(
            "There is nothing to validate. Give a TARGET; or --plan fp16-mixed -- python train.py --seed {seed}; or "
            "--baseline and --candidate, commands with {seed} in them that each train in one precision."
        )
    if target is not None and commands:
        raise ComparisonError(f"Target '{target}' and {next(iter(commands))} are both given. Give one of them.")
    if target is None and (plan or any(limit is not None for limit in limits)):
        raise ComparisonError("--plan, --steps, --epochs and --batches are for a target. Put them into the commands.")
    if target is None and curve is not None:
        raise ComparisonError("--curve is for a target: the curves of commands are what they write. Leave it out.")


def _ray_runner(jobs: int | None, timeout: float | None) -> Runner:
    from floatline.integrations.ray import RayRunner

    return RayRunner(jobs=jobs, timeout=timeout)


def _write_report(result: Validation) -> str:
    from pathlib import Path

    from floatline.report.validation.report import write_report

    return str(write_report(result, Path(result.folder)))


def _print(result: Validation, report: str) -> None:
    from pathlib import Path

    from floatline.report.validation.terminal import print_validation

    print_validation(result, text_console(), report=Path(report))
