"""A diagnosis for people: the primary cause in ten lines, then the rest and the step's chart. Computes nothing."""

from __future__ import annotations

import linecache
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from floatline.base.texts import printable

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.diagnosis.result import Diagnosis
    from floatline.findings import Finding

_VERDICTS = {
    "precision": "a precision problem",
    "not-precision": "not a precision problem",
    "no-verdict": "whether precision is to blame is not known",
}
# The finding is read first and at once.
_MOST_TRIED = 2  # lines
_WIDTH = 100


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis."""
    if diagnosis.primary is None and diagnosis.no_verdict:
        console.print(styled_line(("no verdict", "bold yellow"), f"  {diagnosis.no_verdict}"), soft_wrap=True)
        console.print(styled_line(_run(diagnosis)), soft_wrap=True)
    elif diagnosis.primary is None and diagnosis.unexplained:
        console.print(styled_line(("unexplained", "bold red"), f"  {diagnosis.unexplained}"), soft_wrap=True)
        console.print(styled_line(f"{_run(diagnosis)}; {_VERDICTS[diagnosis.verdict]}"), soft_wrap=True)
    elif diagnosis.primary is None:
        console.print(styled_line(("healthy", "bold green"), f"  No finding: {_run(diagnosis)}."), soft_wrap=True)
    else:
        _print_primary(diagnosis, diagnosis.primary, console)
        _print_others(diagnosis.findings[1:], console)
        _print_chart(diagnosis, console)
    for note in diagnosis.notes:
        console.print(styled_line((f"note: {note}", "dim")), soft_wrap=True)


def _print_primary(diagnosis: Diagnosis, finding: Finding, console: Console) -> None:
    cause = finding.cause
    console.print(styled_line((cause.id, "bold red"), "  ", (cause.title, "bold")), soft_wrap=True)
    _print_code("where", styled_line(_place(finding)), console)
    source = _source_line(finding)
    if source:
        _print_code("", styled_line((f"{finding.line} | ", "dim"), source), console)
    _print_prose("seen", finding.seen, console)
    for number, line in enumerate(finding.fix.splitlines() or [""]):
        _print_code("" if number else "fix", styled_line((line, "green")), console)
    left = _MOST_TRIED
    for text in (*([finding.tried] if finding.tried else []), *diagnosis.tried):
        lines = _wrap(text, console)
        if left < len(lines) and left < _MOST_TRIED:
            break
        _print_prose("tried", text, console)
        left -= len(lines)
    _print_code("why", styled_line(f"floatline explain {cause.id}"), console)
    _print_code("run", styled_line(f"{_run(diagnosis)}; {_VERDICTS[diagnosis.verdict]}"), console)


def _print_others(findings: tuple[Finding, ...], console: Console) -> None:
    if not findings:
        return
    console.print(Text("\nAlso found, in the order worth fixing", style="bold"))
    for number, finding in enumerate(findings, start=2):
        rest = f"  {_place(finding)}  {finding.seen}"
        console.print(styled_line(f"  {number}. ", (finding.cause.id, "yellow"), rest), soft_wrap=True)


def _print_chart(diagnosis: Diagnosis, console: Console) -> None:
    if not diagnosis.chart:
        return
    from floatline.report.chart import draw_step

    console.print()
    console.print(draw_step(diagnosis.chart, width=min(console.width, _WIDTH)), soft_wrap=True)


def _print_code(label: str, text: Text, console: Console) -> None:
    """One line that is never broken, so that it can be copied."""
    console.print(styled_line((f"  {label:<7}", "cyan")) + text, soft_wrap=True)


def _print_prose(label: str, words: str, console: Console) -> None:
    """Sentences, broken between words."""
    for number, line in enumerate(_wrap(words, console)):
        _print_code("" if number else label, styled_line(line), console)


def _wrap(words: str, console: Console) -> list[str]:
    width = max(min(console.width, _WIDTH) - 9, 20)
    return textwrap.wrap(printable(words), width, break_on_hyphens=False, break_long_words=False) or [""]


def _run(diagnosis: Diagnosis) -> str:
    precision = f" in {diagnosis.precision}" if diagnosis.precision else ""
    return f"{diagnosis.target}{precision}, {diagnosis.seconds:.1f} s"


def _place(finding: Finding) -> str:
    """Every part of the place that is known: 'model.py:31 in blocks.1.ff, aten.mm'."""
    place = _short(finding.file) + (f":{finding.line}" if finding.line else "") if finding.file else ""
    inside = finding.module or ("" if place else "the model")
    parts = " in ".join(part for part in (place, inside) if part)
    return f"{parts}, {finding.op}" if finding.op else parts


def _short(file: str) -> str:
    """The path from here, where that is inside this folder."""
    path = Path(file)
    here = Path(os.curdir).resolve()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else file


def _source_line(finding: Finding) -> str:
    """The line of code that the finding names; '' where it cannot be read."""
    if not finding.file or not finding.line:
        return ""
    linecache.checkcache(finding.file)
    return linecache.getline(finding.file, finding.line).strip()


def styled_line(*parts: str | tuple[str, str]) -> Text:
    """One line, each part with its style; never read as markup."""
    styled = [part if isinstance(part, tuple) else (part, "") for part in parts]
    return Text.assemble(*((printable(words), style) for words, style in styled))
