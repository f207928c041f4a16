"""`floatline manifest`: what a run really computes in, measured in one of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import COMMAND, AsDevice, AsOption, FormatOption, OutputFormat, print_json, text_console

if TYPE_CHECKING:
    from floatline.manifests.manifest import Manifest


def manifest(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B] | -- COMMAND", help="A saved manifest, or two to compare; or -- python train.py ARGUMENTS."
        ),
    ],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of the applied step that is measured.")] = 1,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="PLAN", help="What the run is believed to be: bf16-mixed, or a YAML file."),
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="Write the manifest to this file, to compare later.")
    ] = None,
    as_device: AsOption = None,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say what a training script really computes in, without an edit.

    The script runs as it is until its first step is applied, and is ended there. Formats of weights, gradients, states
    and buffers are read from its live objects; FLOPs by format, and what updates, decays and sums lost to rounding,
    are measured in that step. Two saved manifests are compared. Exit code 0 means that nothing is lost, and that all is
    as expected; 1 that something is, or that two manifests differ; 2 that no step could be measured.
    """
    from floatline.manifests.expectation import resolve_expectation

    believed = None if expect is None else resolve_expectation(expect)
    others: list[Manifest] = []
    if COMMAND in context.meta:
        found, *others = _measure(context, steps, as_device, output)
    else:
        given = [name for name in ("steps", "as_device", "save") if _is_given(context, name)]
        if given:
            option = {"as_device": "as"}.get(given[0], given[0])
            raise typer.BadParameter(f"--{option} is for a script: give its command after --.")
        if len(files) > 1:
            _compare(files, output)
            return
        from floatline.manifests.manifest import Manifest

        found = Manifest.load(files[0])
    if save is not None:
        found.save(save)
    differences = () if believed is None else believed.differences(found)
    _print((found, *others), differences, expect, output)
    if differences or (found.lines and believed is None):
        raise typer.Exit(1)


def _is_given(context: typer.Context, name: str) -> bool:
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _measure(
    context: typer.Context, steps: int, as_device: AsDevice | None, output: OutputFormat
) -> tuple[Manifest, ...]:
    from floatline.manifests.script import measure_script

    with saying_how_to_go_on("Nothing was measured: the same command begins again."):
        return measure_script(
            context.meta[COMMAND],
            steps=steps,
            keep_stdout=output is OutputFormat.json,
            on_progress=lambda text: typer.echo(f"floatline: {text}", err=True),
            as_device="cuda" if as_device is AsDevice.cuda else None,
        )


def _print(ranks: tuple[Manifest, ...], differences: tuple[str, ...], expect: str | None, output: OutputFormat) -> None:
    if output is OutputFormat.json:
        rows = [row for found in ranks for row in found.as_json()["ranks"]]
        print_json(ranks[0].as_json() | {"ranks": rows, "expected": expect, "differences": list(differences)})
        return
    from floatline.report.manifest import print_manifest

    print_manifest(ranks[0], text_console(), differences=differences, expected=expect)


def _compare(files: list[str], output: OutputFormat) -> None:
    from floatline.manifests.difference import compare_manifests
    from floatline.manifests.manifest import Manifest

    if len(files) > 2:
        raise typer.BadParameter(f"{len(files)} manifests are given. Give two to compare, or one to show.")
    rows = compare_manifests(Manifest.load(files[0]), Manifest.load(files[1]))
    if output is OutputFormat.json:
        print_json({"a": files[0], "b": files[1], "differences": [row.as_json() for row in rows]})
    else:
        from floatline.report.manifest import print_differences

        print_differences(rows, files[0], files[1], text_console())
    if rows:
        raise typer.Exit(1)
