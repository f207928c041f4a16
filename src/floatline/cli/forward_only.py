"""What `floatline diagnose --forward` does: a model that is not trained, asked whether it may run in 16 bits."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from floatline.cli.output import DiagnoseAs, OutputFormat, show_progress

if TYPE_CHECKING:
    from floatline.diagnosis.forward.result import ForwardDiagnosis


@dataclass(frozen=True)
class ForwardOptions:
    """Options of `diagnose` that hold for a forward pass, too."""

    seed: int
    tries: bool
    trace: str | None
    output: OutputFormat
    as_device: DiagnoseAs | None


def diagnose_forward_any(
    target: str | None, words: list[str] | None, folder: str | None, tokens: str | None, options: ForwardOptions
) -> ForwardDiagnosis:
    """Diagnose a target, the command after `--`, or a model directory."""
    if (folder is None) != (tokens is None):
        raise typer.BadParameter("--model FOLDER and --tokens FILE go together. Give both.")
    if (target is None) == (folder is None):
        raise typer.BadParameter("--forward needs one thing to look at: FILE.py, -- python SCRIPT, or --model FOLDER.")
    if options.as_device is not None and words is None:
        raise typer.BadParameter("--as is for a script: give its command after --. Others are computed so already.")
    if words is not None:
        return _diagnose_command(words, options)
    if target is not None:
        return _diagnose_target(target, options)
    return _diagnose_checkpoint(str(folder), str(tokens), options)


def _diagnose_target(target: str, options: ForwardOptions) -> ForwardDiagnosis:
    from floatline.diagnosis.forward.forward_target import diagnose_forward

    with contextlib.redirect_stdout(sys.stderr), show_progress() as show:
        return diagnose_forward(
            target,
            seed=options.seed,
            searches=options.tries,
            on_progress=show,
            trace_path=options.trace,
            tries_fixes=options.tries,
        )


def _diagnose_checkpoint(folder: str, tokens: str, options: ForwardOptions) -> ForwardDiagnosis:
    from floatline.diagnosis.forward.forward_diagnosis import diagnose_captured
    from floatline.integrations.transformers.checkpoint_folders import open_model
    from floatline.probe.steps.captured_forward import capture_forward

    with contextlib.redirect_stdout(sys.stderr), show_progress() as show:
        show("loading the model")
        step = capture_forward(*open_model(folder, tokens))
        return diagnose_captured(step, folder, searches=options.tries, on_progress=show, trace_path=options.trace)


def _diagnose_command(words: list[str], options: ForwardOptions) -> ForwardDiagnosis:
    from floatline.diagnosis.forward.script import diagnose_forward_script

    return diagnose_forward_script(
        words,
        searches=options.tries,
        keep_stdout=options.output is OutputFormat.json,
        as_device="cuda" if options.as_device is DiagnoseAs.cuda else None,
    )
