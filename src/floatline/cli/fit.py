"""`floatline fit`: which checkpoints of a folder fit FP16, as they are, after a fold, or with modules in FP32."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.fold import MarginOption, TokensOption
from floatline.cli.output import FormatOption, OutputFormat, print_json, show_progress, text_console


def fit(
    folder: Annotated[str, typer.Argument(help="Folder of checkpoints, each a folder with config.json.")],
    tokens: TokensOption,
    log: Annotated[
        str, typer.Option("--log", metavar="FILE", help="Where rows are kept; those that are there are not run again.")
    ] = "fit.json",
    margin: MarginOption = 4.0,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Say of each checkpoint whether it fits FP16: as it is, after folding, with some modules in FP32, or not.

    Each is run in FP32, BF16 and FP16 on the tokens. It fits where FP16 is as near to FP32 as BF16 is. Exit code 0
    means that all fit as they are or after folding, 1 that some do not, 2 that nothing could be tried.
    """
    from floatline.integrations.transformers.checkpoint_fits import fit_checkpoints

    with (
        saying_how_to_go_on(f"Rows that are finished are in {log}: the same command goes on."),
        show_progress() as progress,
    ):
        rows = fit_checkpoints(folder, tokens, margin=margin, log=log, progress=progress)
    if output is OutputFormat.json:
        print_json({"folder": folder, "checkpoints": [{k: v for k, v in row.items() if k != "key"} for row in rows]})
    else:
        from floatline.report.fold import print_fits

        print_fits(rows, text_console())
    if any(row["verdict"] not in ("as it is", "after folding") for row in rows):
        raise typer.Exit(1)
