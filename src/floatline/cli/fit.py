"""`floatline fit`: which checkpoints of a folder fit FP16, as they are, after a fold, or with modules in FP32."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.fold import InputsOption, MarginOption, TokensOption, check_inputs, read_inputs, read_target
from floatline.cli.output import FormatOption, OutputFormat, print_json, show_progress, text_console


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER | TARGET",
            help="Folder of checkpoints, each a folder with config.json; or FILE.py with forward(seed).",
        ),
    ],
    tokens: TokensOption = None,
    inputs: InputsOption = None,
    log: Annotated[
        str, typer.Option("--log", metavar="FILE", help="Where rows are kept; those that are there are not run again.")
    ] = "fit.json",
    margin: MarginOption = 4.0,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say of each checkpoint whether it fits FP16: as it is, after folding, with some modules in FP32, or not.

    Each is run in FP32, BF16 and FP16. It fits where FP16 is as near to FP32 as BF16 is. Exit code 0
    means that all fit as they are or after folding, 1 that some do not, 2 that nothing could be tried.
    """
    from pathlib import Path

    check_inputs(source, tokens, inputs)
    with (
        saying_how_to_go_on(f"Rows that are finished are in {log}: the same command goes on."),
        show_progress() as progress,
    ):
        rows = (
            _fit_folder(source, tokens, inputs, margin, log, progress)
            if Path(source).is_dir()
            else _fit_target(source, margin)
        )
    if output is OutputFormat.json:
        print_json({"folder": source, "checkpoints": [{k: v for k, v in row.items() if k != "key"} for row in rows]})
    else:
        from floatline.report.fold import print_fits

        print_fits(rows, text_console())
    if any(row["verdict"] not in ("as it is", "after folding") for row in rows):
        raise typer.Exit(1)


def _fit_folder(
    folder: str, tokens: str | None, inputs: str | None, margin: float, log: str, progress: Any
) -> list[dict[str, Any]]:
    from floatline.integrations.transformers.checkpoint_fits import GivenInputs, fit_checkpoints

    given = None if inputs is None else GivenInputs(inputs.partition(".py")[0] + ".py", read_inputs(inputs))
    return fit_checkpoints(folder, tokens, inputs=given, margin=margin, log=log, progress=progress)


def _fit_target(target: str, margin: float) -> list[dict[str, Any]]:
    from floatline.folding.model_fit import fit_model

    model, inputs = read_target(target)
    return [{"checkpoint": target} | fit_model(model, inputs, margin=margin).as_json()]
