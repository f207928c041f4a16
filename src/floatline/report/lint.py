"""Lint findings and rules for people, programs, code scanning (SARIF), GitHub and the docs. Computes nothing."""

from __future__ import annotations

import hashlib
import inspect
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline import __version__
from floatline.lint.fixing import Replacement, replace_lines
from floatline.lint.paths import PROJECT
from floatline.lint.rule import read_examples

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.lint import LintFinding, LintResult
    from floatline.lint.rule import Rule


_PAGES = "https://github.com/floatline/floatline/blob/main/docs/lint"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def print_findings(
    console: Console, result: LintResult, findings: Sequence[LintFinding], *, fixed: bool = False, unsafe: bool = False
) -> None:
    """Print four lines for each finding, and a line that counts.

    Args:
        console: Where to.
        result: What was found.
        findings: What of it is told.
        fixed: Whether safe rewrites were made: what is left has none that fits.
        unsafe: Whether the others were made, too.
    """
    from rich.text import Text

    for one in findings:
        place = f"{one.file}:{one.line}:{one.column}: "
        console.print(Text.assemble((place, "bold"), (one.rule.code, "bold red"), f" {one.title}"), soft_wrap=True)
        if one.text:
            console.print(Text(f"  {one.line} | {one.text}", style="dim"), soft_wrap=True)
        console.print(Text(f"  seen: {one.seen}"), soft_wrap=True)
        if one.when:
            console.print(Text.assemble("  when: ", (one.when, "dim")), soft_wrap=True)
        console.print(Text.assemble("  fix:  ", (one.advice, "green")), soft_wrap=True)
        console.print(Text.assemble("  why:  ", (f"floatline explain {one.rule.code}", "dim")), soft_wrap=True)
    if fixed and result.fixed:
        files = len(result.changes)
        console.print(Text(f"{_count(len(result.fixed), 'place')} fixed in {_count(files, 'file')}."), soft_wrap=True)
    console.print(Text(_summary(result, findings, fixed=fixed, unsafe=fixed and unsafe)), soft_wrap=True)


def _summary(result: LintResult, findings: Sequence[LintFinding], *, fixed: bool, unsafe: bool) -> str:
    looked = f"{_count(result.num_files, 'file')}, {result.num_lines:,} lines"
    rest = len(result.only_in_half)
    why = "in pure half, or for some input" if result.shows_16_bits or result.num_files < PROJECT else "in 16 bits"
    in_tests = sum(one.holds == "any" for one in result.only_in_half)
    more = f" {rest:,} more hold {why}, which nothing here shows: --half tells them." if rest > in_tests else ""
    if in_tests:
        more += (
            f" {in_tests:,} of them stand in tests."
            if more
            else f" {in_tests:,} more stand in tests: --half tells them."
        )
    if not findings:
        return f"No finding in {looked}.{more}"
    text = f"{_count(len(findings), 'finding')} in {looked}."
    safe = sum(bool(one.fix) and one.rule.fix_safety == "safe" for one in findings)
    others = sum(bool(one.fix) and one.rule.fix_safety == "unsafe" for one in findings)
    if safe and not fixed:
        text += f" {safe} can be fixed with --fix."
    if others and not unsafe:
        text += f" {others} more can be fixed with --unsafe-fixes; look at them with --diff."
    return text + more


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
        "only_in_half": len(result.only_in_half),
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
                "helpUri": f"{_PAGES}/{rule.code}.md",
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
    file = {"uri": _relative(one.file).replace(os.sep, "/")}
    where = {"artifactLocation": file, "region": region}
    change = replace_lines(one)
    fixes = {} if change is None else {"fixes": [_fix(one, file, change)]}
    return {
        "ruleId": one.rule.code,
        "level": "warning",
        "message": {"text": f"{one.seen}. Fix: {one.advice}"},
        "locations": [{"physicalLocation": where}],
        "partialFingerprints": {"floatline/v1": _fingerprint(one)},
        "properties": {"holds": one.holds},
        **fixes,
    }


def _fix(one: LintFinding, file: dict[str, str], change: Replacement) -> dict[str, Any]:
    """A change of whole lines."""
    if change.num:
        end, text = (change.line + change.num - 1, len(change.last) + 1), change.text
    else:
        end, text = (change.line, 1), f"{change.text}\n"
    region = {"startLine": change.line, "startColumn": 1, "endLine": end[0], "endColumn": end[1]}
    replaced = {"deletedRegion": region, "insertedContent": {"text": text}}
    safety = (
        "the same function in exact arithmetic" if one.rule.fix_safety == "safe" else "look at it before you take it"
    )
    return {
        "description": {"text": f"{one.advice} ({safety})"},
        "artifactChanges": [{"artifactLocation": file, "replacements": [replaced]}],
    }


def _fingerprint(one: LintFinding) -> str:
    """The same for a line that moved: by its file, its rule and what it says."""
    return hashlib.sha256("\0".join((_relative(one.file), one.rule.code, one.text)).encode()).hexdigest()[:32]


def _relative(file: str) -> str:
    path = Path(file)
    if not path.is_absolute():
        return path.as_posix()
    return (path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path).as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_WIDTH = 88


def print_rule(console: Console, rule: type[Rule]) -> None:
    """Print what it flags, why, what to write instead, with an example."""
    from rich.text import Text

    console.print(
        Text.assemble((rule.code, "bold cyan"), "  ", (rule.name, "bold cyan"), "  ", (rule_title(rule), "bold"))
    )
    for heading, text in rule_sections(rule):
        console.print()
        if heading:
            console.print(Text(heading, style="bold"))
        for paragraph in text.split("\n\n"):
            width = min(console.width, _WIDTH) - 2
            for line in textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False):
                console.print(Text(f"  {line}"), soft_wrap=True)
    flagged = read_examples(rule.bad)
    shown = next((bad for bad in flagged if bad.fixed is not None), flagged[0])
    for heading, code in (("Flagged", shown.source), ("Instead", shown.fixed or rule.advice)):
        console.print(Text(f"\n{heading}", style="bold"))
        for line in code.splitlines():
            console.print(Text(f"  {line}", style="green" if heading == "Instead" else ""), soft_wrap=True)
    if rule.cause is not None:
        console.print(Text(f"\nThe cause: floatline explain {rule.cause.id}"), soft_wrap=True)
    console.print(Text(f"\nTo keep a line as it is: # floatline: allow[{rule.name}]"), soft_wrap=True)


def rule_as_json(rule: type[Rule]) -> dict[str, Any]:
    """Plain fields, for programs."""
    return {
        "code": rule.code,
        "name": rule.name,
        "title": rule_title(rule),
        "cause": rule.cause.id if rule.cause else None,
        "message": rule.message,
        "fix": rule.advice,
        "fix_safety": rule.fix_safety,
        "explanation": inspect.cleandoc(rule.__doc__ or ""),
        "bad": [{"source": bad.source, "fixed": bad.fixed, "file": bad.file} for bad in read_examples(rule.bad)],
        "good": [good.source for good in read_examples(rule.good)],
    }


def rule_title(rule: type[Rule]) -> str:
    """Its own title, or what it shares with its cause."""
    return rule.title or (rule.cause.title if rule.cause else rule.message)


def rule_sections(rule: type[Rule]) -> list[tuple[str, str]]:
    """The headings of the docstring, with what stands under each; the first has none."""
    text = inspect.cleandoc(rule.__doc__ or "")
    first, *rest = text.split("\n## ")
    return [("", first.strip()), *((part.split("\n", 1)[0].strip(), part.split("\n", 1)[-1].strip()) for part in rest)]
