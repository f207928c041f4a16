"""Lint findings for people, programs (JSON), code scanning (SARIF) and GitHub's annotations. Computes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.lint import LintFinding, LintResult

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def print_findings(
    console: Console, result: LintResult, findings: Sequence[LintFinding], *, fixed: bool = False
) -> None:
    """Print four lines for each finding, and a line that counts."""
    from rich.text import Text

    for one in findings:
        place = f"{one.file}:{one.line}:{one.column}: "
        console.print(Text.assemble((place, "bold"), (one.rule.code, "bold red"), f" {one.title}"), soft_wrap=True)
        if one.text:
            console.print(Text(f"  {one.line} | {one.text}", style="dim"), soft_wrap=True)
        console.print(Text(f"  seen: {one.seen}"), soft_wrap=True)
        console.print(Text.assemble("  fix:  ", (one.advice, "green")), soft_wrap=True)
        console.print(Text.assemble("  why:  ", (f"floatline explain {one.rule.code}", "dim")), soft_wrap=True)
    if fixed and result.fixed:
        files = len(result.changes)
        console.print(Text(f"{_count(len(result.fixed), 'place')} fixed in {_count(files, 'file')}."), soft_wrap=True)
    console.print(Text(_summary(result, findings, fixed=fixed)), soft_wrap=True)


def _summary(result: LintResult, findings: Sequence[LintFinding], *, fixed: bool) -> str:
    looked = f"{_count(result.num_files, 'file')}, {result.num_lines:,} lines"
    if not findings:
        return f"No finding in {looked}."
    text = f"{_count(len(findings), 'finding')} in {looked}."
    safe = sum(bool(one.fix) and one.rule.fix_safety == "safe" for one in findings)
    unsafe = sum(bool(one.fix) and one.rule.fix_safety == "unsafe" for one in findings)
    if safe and not fixed:
        text += f" {safe} can be fixed with --fix."
    if unsafe:
        text += f" {unsafe} more can be fixed with --unsafe-fixes; look at them with --diff."
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def as_json(result: LintResult, findings: Sequence[LintFinding], *, seconds: float) -> dict[str, Any]:
    """One object for programs."""
    return {
        "findings": [one.as_json() for one in findings],
        "fixed": [one.as_json() for one in result.fixed],
        "files": result.num_files,
        "lines": result.num_lines,
        "unread": [{"file": file, "why": why} for file, why in result.unread],
        "seconds": round(seconds, 3),
    }


def as_diff(result: LintResult) -> str:
    """The changes as one unified diff; paths from the present folder, so that `git apply` and `patch -p1` take it."""
    from floatline.fixes.code_fix import draw_diff

    return "".join(draw_diff(_relative(file), before, after) for file, before, after in result.changes)


def as_github(findings: Sequence[LintFinding]) -> str:
    """One workflow command for each finding: GitHub shows it beside the line."""
    return "\n".join(
        f"::warning file={_property(_relative(one.file))},line={one.line},col={one.column},endLine={one.end_line},"
        f"title={_property(f'{one.rule.code} {one.rule.name}')}::{_data(f'{one.seen}. Fix: {one.advice}')}"
        for one in findings
    )


def as_sarif(findings: Sequence[LintFinding]) -> dict[str, Any]:
    """SARIF 2.1.0, as code scanning reads it."""
    rules = sorted({one.rule for one in findings}, key=lambda rule: rule.code)
    driver = {
        "name": "floatline",
        "version": __version__,
        "rules": [
            {
                "id": rule.code,
                "name": rule.name,
                "shortDescription": {"text": rule.title or (rule.cause.title if rule.cause else rule.name)},
                "fullDescription": {"text": rule.message},
                "help": {"text": f"{rule.advice}\n\nfloatline explain {rule.code}"},
            }
            for rule in rules
        ],
    }
    results = [_result(one) for one in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(one: LintFinding) -> dict[str, Any]:
    region = {
        "startLine": one.line,
        "startColumn": one.column,
        "endLine": one.end_line,
        "endColumn": max(one.end_column, one.column) if one.end_line == one.line else one.end_column,
    }
    where = {"artifactLocation": {"uri": _relative(one.file).replace(os.sep, "/")}, "region": region}
    return {
        "ruleId": one.rule.code,
        "level": "warning",
        "message": {"text": f"{one.seen}. Fix: {one.advice}"},
        "locations": [{"physicalLocation": where}],
    }


def _relative(file: str) -> str:
    path = Path(file)
    if not path.is_absolute():
        return path.as_posix()
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
