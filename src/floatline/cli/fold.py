"""`floatline fold`: a checkpoint whose values are too large for FP16, scaled by powers of two that nothing sees."""

from __future__ import annotations

from typing import Annotated

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import FormatOption, OutputFormat, print_json, show_progress, text_console

TokensOption = Annotated[
    str, typer.Option("--tokens", metavar="FILE", help="Token ids as JSON, or a text for the folder's tokenizer.")
]
MarginOption = Annotated[
    float, typer.Option("--margin", min=1.0, help="How many times larger than measured a value may become.")
]


def fold(
    folder: Annotated[str, typer.Argument(help="Folder of a transformers checkpoint, with safetensors.")],
    tokens: TokensOption,
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="New folder for the folded checkpoint.")],
    margin: MarginOption = 4.0,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give an embedding that is the head too a copy of its own for the head.")
    ] = False,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Fold a checkpoint for FP16, prove that it computes the same, and write it as safetensors.

    Exit code 0 means that the checkpoint fits FP16, folded or as it is; 1 that something stands in the way; 2 that it
    cannot be read or written. A checkpoint that fits as it is, or whose fold is not proven, is not written.
    """
    from pathlib import Path

    from floatline.folding.scale_fold import fold as fold_model
    from floatline.integrations.transformers.checkpoint_folders import load_checkpoint, save_folded

    if Path(out).exists():
        raise typer.BadParameter(f"--out '{out}' exists. Name a new folder.")
    with saying_how_to_go_on("Nothing was written: the same command begins again."), show_progress() as progress:
        progress(f"loading {folder}")
        checkpoint = load_checkpoint(folder, tokens)
        progress("folding, and running both models")
        found = fold_model(checkpoint.model, checkpoint.inputs, margin=margin, untie=untie, shared_eps=checkpoint.eps)
        written = None
        if found.rewrite and found.proof.holds:
            progress(f"writing {out}")
            written = save_folded(checkpoint, found, out)
    if output is OutputFormat.json:
        place = None if written is None else out
        print_json({"model": folder, "out": place, "read_back_difference": written} | found.as_json())
    else:
        from floatline.report.fold import print_fold

        print_fold(found, text_console(), folder=folder, out=out, difference=written)
    if found.verdict not in ("as it is", "folded"):
        raise typer.Exit(1)
