"""`floatline rescue`: from a broken 16-bit run to a plan that is verified against FP32."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import (
    COMMAND,
    AsOption,
    Engine,
    EngineOption,
    FormatOption,
    OutputFormat,
    SeedOption,
    print_json,
    show_progress,
    text_console,
)


def rescue(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET [KEY=VALUE]... | -- COMMAND",
            help="What is trained: FILE.py, package.module or package.module:name; NAME[:VARIANT] of a reference "
            "workload, with its settings; or -- python train.py ARGUMENTS.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps every run takes. The default is 40; in the validation, one pass or 200.",
        ),
    ] = None,
    seed: SeedOption = 0,
    budget: Annotated[
        float,
        typer.Option("--budget", min=1.0, help="Seconds that the search may take, and trying plans again as many."),
    ] = 60.0,
    prove: Annotated[bool, typer.Option("--prove", help="Run the full validation instead of the short one.")] = False,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder", metavar="FOLDER", help="Folder of the results. The default is floatline-runs/rescue/NAME."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            help="What a script is validated by, as validate takes it. The default is the loss. Only with --.",
        ),
    ] = None,
    higher_is_better: Annotated[
        bool | None,
        typer.Option(
            "--higher-is-better/--lower-is-better",
            help="Whether higher or lower values of the metric are better. The default is lower. Only with --.",
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", help="Seconds that one run of a script's validation may take.")
    ] = None,
    as_device: AsOption = None,
    engine: EngineOption = Engine.local,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Diagnose a target or a script, find what makes it train as FP32 does, and verify it.

    A command after -- is a script: a change of its own lines is tried first, then plans that floatline run puts into
    force. It is not edited, and what it writes in trials is kept apart.
    Writes plan.yaml, rescue.json, report.html, and fix.patch where a change of the code was tried and holds. The code
    is left alone.
    Exit code 0 means that the plan is verified, or that none is needed; 1 that something is left to do. Ctrl-C keeps
    what is finished, and exits with 130; the same command goes on.
    """
    import sys
    from pathlib import Path

    from floatline.rescuing.finished_stages import refuse_foreign

    words: list[str] | None = context.meta.get(COMMAND)
    if words is None and (metric or limit or as_device or higher_is_better is not None):
        named = "--metric, --higher-is-better, --limit and --as"
        raise typer.BadParameter(f"{named} are for a script: give its command after --.")
    place = Path("floatline-runs/rescue") / _name(target, words) if folder is None else Path(folder)
    refuse_foreign(place)  # now, and not after torch is loaded
    asked: dict[str, Any] = {"steps": steps, "seed": seed, "prove": prove, "folder": place}
    # What the target prints is not the report.
    with (
        saying_how_to_go_on("What is finished is kept: the same command goes on."),
        contextlib.redirect_stdout(sys.stderr),
        show_progress() as show,
    ):
        from floatline.report.rescue import print_rescue, write_rescue

        if words is not None:
            from floatline.rescuing.script_rescue import rescue_script

            device = "" if as_device is None else "cuda"
            more: dict[str, Any] = {"metric": metric or "loss", "higher_is_better": higher_is_better}
            more |= {"device": device, "timeout": limit}
            result = rescue_script(words, budget=10 * budget, on_progress=show, on_start=show.aloud, **more, **asked)
        else:
            from floatline.rescuing.rescue import rescue as save

            elsewhere = _on_ray(target, steps, seed) if engine is Engine.ray else {}
            result = save(target, budget=budget, on_progress=show, **asked, **elsewhere)
        files = write_rescue(result, place)
    if output is OutputFormat.json:
        print_json({**result.as_json(), "files": files})
    else:
        print_rescue(result, files, text_console())
    if not result.solved:
        raise typer.Exit(1)


def _name(target: str, words: list[str] | None) -> str:
    from floatline.training.settings import name_folder

    if words is None:
        return name_folder(target)
    return name_folder(next((word for word in words if word.endswith(".py")), "script"))


def _on_ray(target: str, steps: int | None, seed: int) -> dict[str, Any]:
    from floatline.integrations.ray import RayRunner
    from floatline.integrations.ray_search import RaySearch
    from floatline.rescuing.rescue import STEPS

    return {"runner": RayRunner(), "spread": RaySearch(target, steps=steps or STEPS, seed=seed)}
