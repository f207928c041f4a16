"""`floatline validate`: whether a target trains as well in 16 bits as in FP32, faster and smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from floatline.cli.output import Engine, EngineOption, FormatOption, OutputFormat, print_json, text_console

if TYPE_CHECKING:
    from floatline.validation.result import Validation
    from floatline.validation.running.processes import Runner

# 128 + SIGINT, as shells have it: what is finished is kept, and --resume goes on.
INTERRUPTED = 130


def validate(
    target: Annotated[
        str | None, typer.Argument(help="What is trained: FILE.py, package.module or package.module:name.")
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="PLAN", help="Candidate: a plan's name or YAML file; several are ranked."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="COMMAND", help="Train in FP32 by a command with {seed} in it.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="COMMAND", help="Train a candidate by a command; several are ranked."),
    ] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="What the commands are compared by.")] = None,
    metric_file: Annotated[
        str | None, typer.Option("--metric-file", metavar="GLOB", help="Where the commands write it. [found]")
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", metavar="FOLDER", help="Where the commands run.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=0, help="Steps of each run. [one pass or 200, whichever is longer]")
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", min=0, help="Passes over the batches.")] = None,
    batches: Annotated[int | None, typer.Option("--batches", min=0, help="Use only so many batches.")] = None,
    margin: Annotated[
        tuple[float, float], typer.Option("--margin", help="PASS up to the first, FAIL from the second on.")
    ] = (0.01, 0.02),
    scale: Annotated[
        str, typer.Option("--scale", help="log, log-error or difference: how two values are compared.")
    ] = "log",
    higher_is_better: Annotated[
        bool | None,
        typer.Option("--higher-is-better/--lower-is-better", help="Which way the metric is better. [lower]"),
    ] = None,
    language_model: Annotated[
        bool, typer.Option("--language-model", help="The metric is a language model's loss.")
    ] = False,
    horizon: Annotated[
        int | None, typer.Option("--horizon", min=1, help="Steps of the real training, for the drift test.")
    ] = None,
    min_seeds: Annotated[int, typer.Option("--min-seeds", min=1, help="The fewest seeds that are run.")] = 3,
    max_seeds: Annotated[int, typer.Option("--max-seeds", min=1, help="The most seeds that are run.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="The first seed.")] = 0,
    curve: Annotated[
        str | None, typer.Option("--curve", help="metric or loss: what is compared on the way. [metric, where cheap]")
    ] = None,
    broken: Annotated[
        bool, typer.Option("--broken/--no-broken", help="Train a candidate that must not pass, up to the first look.")
    ] = True,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure speed, memory and layers, too.")
    ] = True,
    folder: Annotated[
        str | None, typer.Option("--folder", metavar="FOLDER", help="Of the study. [floatline-runs/validate/NAME]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in the folder.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs side by side. [one a GPU, or one for two cores]")
    ] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds that one run may take.")] = None,
    engine: EngineOption = Engine.local,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Prove that 16 bits train as well as FP32 here, and measure what they save.

    The arms are trained from the same start over several seeds, until the interval of their difference decides.
    Exit code 0 is a PASS, 1 any other verdict. Ctrl-C keeps what is finished, and exits with 130; --resume goes on.
    """
    from floatline.cli.progress import StudyProgress

    asked: dict[str, Any] = {
        "margins": margin,
        "scale": scale,
        "higher_is_better": higher_is_better,
        "language_model": language_model,
        "horizon": horizon,
        "min_seeds": min_seeds,
        "max_seeds": max_seeds,
        "seed": seed,
        "folder": folder,
        "resume": resume,
    }
    commands = {"--baseline": baseline, "--candidate": candidate, "--metric": metric, "--metric-file": metric_file}
    _check_use(target, {name: value for name, value in commands.items() if value}, plan, curve, steps, epochs, batches)
    if engine is Engine.ray:
        asked["runner"] = _ray_runner(jobs, timeout)
    else:
        asked |= {"jobs": jobs, "timeout": timeout}
    with StudyProgress() as progress:
        try:
            if target is None:
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
                    watcher=progress,
                    **asked,
                )
        except KeyboardInterrupt:
            typer.echo("floatline: interrupted. What is finished is kept: go on with --resume.", err=True)
            raise typer.Exit(INTERRUPTED) from None
    report = _write_report(result)
    if output is OutputFormat.json:
        print_json(result.contract(report))
    else:
        _print(result, report)
    if result.verdict != "PASS":
        raise typer.Exit(1)


def _check_use(
    target: str | None, commands: dict[str, Any], plan: list[str] | None, curve: str | None, *limits: int | None
) -> None:
    """A target, or commands; not both, and not what belongs to the other."""
    from floatline.errors import ComparisonError

    if target is None and "--baseline" not in commands:
        raise ComparisonError("There is nothing to validate. Give a TARGET, or --baseline and --candidate.")
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
