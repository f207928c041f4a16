"""Runs as one page that opens anywhere: no network, light and dark, any width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from floatline.errors import LedgerError
from floatline.report.document.html import page_of
from floatline.report.document.package_files import put_in_place
from floatline.report.run.facts import RunFacts
from floatline.report.run.run_document import document_of


def write_run_page(runs: Sequence[RunFacts], path: Path) -> None:
    """Write the page in one step: a reader never sees half of it.

    Args:
        runs: What is shown; several are laid over each other.
        path: Where it goes.

    Raises:
        LedgerError: It cannot be written there.
    """
    document, tones = document_of(runs)
    text = page_of(document, script="run.js", tones=tones)
    try:
        put_in_place(path, text)
    except OSError as error:
        raise LedgerError(f"{path} cannot be written: {error.strerror}. Choose another place: --out.") from None
