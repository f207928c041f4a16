"""`floatline rescue`: from a broken 16-bit run to a plan that is verified against FP32."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from floatline.cli.output import (
    INTERRUPTED,
    Engine,
    EngineOption,
    FormatOption,
    OutputFormat,
    SeedOption,
    TargetArgument,
    print_json,
    show_progress,
    text_console,
)


def rescue(
    target: TargetArgument,
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
    engine: EngineOption = Engine.local,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Diagnose a target, find a plan under which it trains as FP32 does, and verify it.

    Writes plan.yaml, rescue.json, report.html, and fix.patch where a change of the code was tried and holds. The code
    is left alone.
    Exit code 0 means that the plan is verified, or that none is needed; 1 that something is left to do. Ctrl-C keeps
    what is finished, and exits with 130; the same command goes on.
    """
    import sys
    from pathlib import Path

    from floatline.rescuing.finished_stages import refuse_foreign
    from floatline.training.settings import name_folder

    place = Path("floatline-runs/rescue") / name_folder(target) if folder is None else Path(folder)
    refuse_foreign(place)  # now, and not after torch is loaded
    try:
        # What the target prints is not the report.
        with contextlib.redirect_stdout(sys.stderr), show_progress() as show:
            from floatline.report.rescue import print_rescue, write_rescue
            from floatline.rescuing.rescue import rescue as save

            elsewhere = _on_ray(target, steps, seed) if engine is Engine.ray else {}
            asked: dict[str, Any] = {"steps": steps, "seed": seed, "budget": budget, "prove": prove, **elsewhere}
            result = save(target, folder=place, on_progress=show, **asked)
            files = write_rescue(result, place)
    except KeyboardInterrupt:
        typer.echo("floatline: interrupted. What is finished is kept: the same command goes on.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if output is OutputFormat.json:
        print_json({**result.as_json(), "files": files})
    else:
        print_rescue(result, files, text_console())
    if not result.solved:
        raise typer.Exit(1)


def _on_ray(target: str, steps: int | None, seed: int) -> dict[str, Any]:
    from floatline.integrations.ray import RayRunner
    from floatline.integrations.ray_search import RaySearch
    from floatline.rescuing.rescue import STEPS

    return {"runner": RayRunner(), "spread": RaySearch(target, steps=steps or STEPS, seed=seed)}
