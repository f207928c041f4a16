"""`# floatline: allow[rule-name]`: findings that a person has looked at and wants to keep."""

from __future__ import annotations

import re

from floatline.lint.finding import LintFinding

_COMMENT = re.compile(r"#\s*floatline:\s*allow\[([^\]]*)\]")


def read_allowed(lines: list[str], first_statement: int) -> tuple[frozenset[str], dict[int, frozenset[str]]]:
    """The rules that are allowed in the whole file, and on single lines.

    A comment on a line of its own allows its rules in the line below it; before the first statement (a docstring is
    one), in the whole file. Behind code it allows them in that line. Names and codes both count; `allow[*]` is all.

    Args:
        lines: The file.
        first_statement: The line where code begins.
    """
    whole: set[str] = set()
    single: dict[int, frozenset[str]] = {}
    for number, line in enumerate(lines, 1):
        if "floatline:" not in line or (match := _COMMENT.search(line)) is None:
            continue
        names = frozenset(name.strip() for name in match[1].split(",") if name.strip())
        if line[: match.start()].strip():
            single[number] = single.get(number, frozenset()) | names
        elif number < first_statement:
            whole |= names
        else:
            single[number + 1] = single.get(number + 1, frozenset()) | names
    return frozenset(whole), single


def drop_allowed(
    findings: list[LintFinding], whole: frozenset[str], single: dict[int, frozenset[str]]
) -> list[LintFinding]:
    """Findings without those that are allowed, on any line of their expression."""
    if not whole and not single:
        return findings
    kept: list[LintFinding] = []
    for finding in findings:
        lines = range(finding.line, finding.end_line + 1)
        names = whole.union(*(single.get(number, frozenset()) for number in lines))
        if not names & {finding.rule.name, finding.rule.code, "*"}:
            kept.append(finding)
    return kept
