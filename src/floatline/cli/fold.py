"""`floatline fold`: a model whose values are too large for FP16, scaled by powers of two that nothing sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import FormatOption, OutputFormat, print_json, show_progress, text_console

if TYPE_CHECKING:
    from floatline.folding.scale_fold import Fold

TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="FILE", help="Token ids as JSON, or a text for the folder's tokenizer."),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE.py",
        help="For a checkpoint that takes no tokens: forward(seed), whose inputs are taken, or whatever returns some.",
    ),
]
MarginOption = Annotated[
    float, typer.Option("--margin", min=1.0, help="How many times larger than measured a value may become.")
]


def fold(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER | TARGET",
            help="Folder of a transformers checkpoint, with safetensors; or FILE.py with forward(seed).",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="New folder for the folded checkpoint.")],
    tokens: TokensOption = None,
    inputs: InputsOption = None,
    margin: MarginOption = 4.0,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give an embedding that is the head too a copy of its own for the head.")
    ] = False,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Fold a checkpoint, or the model of a target, for FP16, prove that it computes the same, and write safetensors.

    Exit code 0 means that the model fits FP16, folded or as it is; 1 that something stands in the way; 2 that it
    cannot be read or written. One that fits as it is, or whose fold is not proven, is not written.
    """
    from pathlib import Path

    if Path(out).exists():
        raise typer.BadParameter(f"--out '{out}' exists. Name a new folder.")
    check_inputs(source, tokens, inputs)
    with saying_how_to_go_on("Nothing was written: the same command begins again."), show_progress() as progress:
        if Path(source).is_dir():
            found, written = _fold_checkpoint(source, out, tokens, inputs, margin, untie, progress)
        else:
            found, written = _fold_target(source, out, margin, untie, progress)
    if output is OutputFormat.json:
        place = None if written is None else out
        print_json({"model": source, "out": place, "read_back_difference": written} | found.as_json())
    else:
        from floatline.report.fold import print_fold

        by_hand = not Path(source).is_dir()
        print_fold(found, text_console(), folder=source, out=out, difference=written, eps_by_hand=by_hand)
    if found.verdict not in ("as it is", "folded"):
        raise typer.Exit(1)


def _fold_checkpoint(
    folder: str, out: str, tokens: str | None, inputs: str | None, margin: float, untie: bool, progress: Any
) -> tuple[Fold, float | None]:
    from floatline.folding.scale_fold import fold as fold_model
    from floatline.integrations.transformers.checkpoint_folders import load_checkpoint, save_folded

    progress(f"loading {folder}")
    checkpoint = load_checkpoint(folder, tokens, inputs=None if inputs is None else read_inputs(inputs))
    progress("folding, and running both models")
    found = fold_model(checkpoint.model, checkpoint.inputs, margin=margin, untie=untie, shared_eps=checkpoint.eps)
    if not found.rewrite or not found.proof.holds:
        return found, None
    progress(f"writing {out}")
    return found, save_folded(checkpoint, found, out)


def _fold_target(target: str, out: str, margin: float, untie: bool, progress: Any) -> tuple[Fold, float | None]:
    from floatline.folding.scale_fold import fold as fold_model

    progress(f"loading {target}")
    model, inputs = read_target(target)
    progress("folding, and running both models")
    found = fold_model(model, inputs, margin=margin, untie=untie)
    if not found.rewrite or not found.proof.holds:
        return found, None
    progress(f"writing {out}")
    found.save_folder(out)
    return found, 0.0


def check_inputs(source: str, tokens: str | None, inputs: str | None) -> None:
    """Refuse a folder without anything to run it on, and a target with more than it needs."""
    from pathlib import Path

    is_folder = Path(source).is_dir()
    if is_folder and tokens is None and inputs is None:
        raise typer.BadParameter("A checkpoint is run: give --tokens FILE, or --inputs FILE.py if it takes no tokens.")
    if not is_folder and (tokens is not None or inputs is not None):
        raise typer.BadParameter(
            f"'{source}' is not a folder. --tokens and --inputs are for a checkpoint's folder; a target has its own."
        )


def read_target(target: str) -> tuple[Any, Any]:
    """The model and the inputs of a target with `forward(seed)`."""
    from torch import nn

    from floatline.diagnosis.forward.forward_target import call_forward
    from floatline.errors import FoldError

    model, inputs, _ = call_forward(target, 0)
    if not isinstance(model, nn.Module):
        raise FoldError(f"Target '{target}' gives a function, which has no weights to fold. Return a module.")
    return model, tuple(cast("list[Any]", inputs)) if isinstance(inputs, list) else inputs


def read_inputs(target: str) -> Any:
    """The inputs that a function gives: all that it returns, or what it returns beside a model."""
    from floatline.workload import load_target

    _, _, name = target.rpartition(":")
    made: Any = load_target(target if name.isidentifier() else f"{target}:forward").call(0)
    row = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else []
    return row[1] if len(row) in (2, 3) and callable(row[0]) else cast("Any", made)
