"""`floatline diagnose --compiled`: what torch.compile makes of the same step, beside the diagnosis."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from floatline.cli.output import DiagnoseAs, show_progress, text_console

if TYPE_CHECKING:
    from floatline.agreement.compiled.compiled_report import CompiledReport

_STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow"}


@dataclass(frozen=True)
class CompiledAsked:
    """What `--compiled`, `--backend` and `--out` ask for.

    Args:
        wanted: Whether compiled code is compared.
        backend: What to compile with; None: what the run compiles with, or Inductor.
        out: Where a reproducer goes.
    """

    wanted: bool
    backend: str | None
    out: str | None

    def check(self, *, forward: bool, would_fit: bool, as_device: DiagnoseAs | None) -> None:
        """Refuse options that do not go together."""
        if not self.wanted and (self.backend is not None or self.out is not None):
            raise typer.BadParameter("--backend and --out say how compiled code is compared. Give --compiled, too.")
        if self.wanted and (forward or would_fit):
            raise typer.BadParameter("--compiled looks at a training step. Leave out --forward and --would-fit.")
        if self.wanted and as_device is not None:
            raise typer.BadParameter("torch.compile does not look through --as. Leave out one of both.")

    def compare(self, target: str, words: list[str] | None, seed: int) -> CompiledReport | None:
        """Compare a target, or the script of a command; None where nobody asked."""
        if not self.wanted:
            return None
        from floatline.agreement.compiled.runs import compare_compiled_script, compare_compiled_target

        with contextlib.redirect_stdout(sys.stderr), show_progress() as show:
            show("comparing a step eager, compiled and in FP32")
            if words is not None:
                return compare_compiled_script(words, backend=self.backend, folder=self.out)
            return compare_compiled_target(target, seed=seed, backend=self.backend, folder=self.out)


def print_compiled(found: CompiledReport) -> None:
    """Print the verdict on compiled code, and what decided it."""
    console = text_console()
    first, *rest = found.text.splitlines()
    console.print(first, style=_STYLES[found.status], soft_wrap=True, markup=False, highlight=False)
    for line in rest:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
