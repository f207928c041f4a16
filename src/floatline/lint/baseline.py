"""Baseline: the findings of old code that are known, by what their lines say and not by where they are."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from floatline.base.files import read_bounded, write_whole
from floatline.errors import LintError
from floatline.lint.rule import LintFinding

_NOQA = re.compile(r"#\s*noqa:\s*([A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)", re.IGNORECASE)
_COMMENT = re.compile(r"#\s*floatline:\s*allow\[([^\]]*)\]")


def read_allowed(lines: list[str], first_statement: int) -> tuple[frozenset[str], dict[int, frozenset[str]]]:
    """The rules that are allowed in the whole file, and on single lines.

    A comment on a line of its own allows its rules in the line below it; before the first statement (a docstring is
    one), in the whole file. Behind code it allows them in that line. Names and codes both count; `allow[*]` is all.
    `# noqa: FL101` allows a code in its line.

    Args:
        lines: The file.
        first_statement: The line where code begins.
    """
    whole: set[str] = set()
    single: dict[int, frozenset[str]] = {}
    for number, line in enumerate(lines, 1):
        if "noqa" in line and (match := _NOQA.search(line)) is not None:
            single[number] = single.get(number, frozenset()) | frozenset(re.split(r"[,\s]+", match[1].strip()))
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


_VERSION = 1
_WHAT_NOW = "Write it again with --write-baseline."

Baseline = Counter[tuple[str, str, str]]  # file, code and text of the line: how many of them are known


def write_baseline(path: Path, findings: Iterable[LintFinding], *, root: Path | None = None) -> None:
    """Write findings as known: the whole file, or as it was.

    Args:
        path: The file.
        findings: What is known from now on.
        root: The folder that the names of files begin at; None is the present one.

    Raises:
        LintError: It cannot be written.
    """
    known = count_findings(findings, root=root)
    entries = [
        {"file": file, "code": code, "text": text, "count": count}
        for (file, code, text), count in sorted(known.items())
    ]
    data = {"floatline_baseline": _VERSION, "findings": entries}
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise LintError(f"Baseline cannot be written to '{path}': {error.strerror}. Choose another path.") from None


def read_baseline(path: Path) -> Baseline:
    """The findings that are known.

    Raises:
        LintError: The file is not there, or is damaged.
    """
    try:
        data: Any = json.loads(read_bounded(path))
    except OSError as error:
        raise LintError(f"Baseline '{path}' cannot be read: {error.strerror}. {_WHAT_NOW}") from None
    except (ValueError, RecursionError):
        raise LintError(f"Baseline '{path}' is damaged: it is not JSON. {_WHAT_NOW}") from None
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    if fields.get("floatline_baseline") != _VERSION:
        raise LintError(f"Baseline '{path}' is not one of version {_VERSION}. {_WHAT_NOW}")
    entries = fields.get("findings")
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):  # pyright: ignore[reportUnknownArgumentType]
        raise LintError(f"Baseline '{path}' is damaged: its findings have no file, code, text and count. {_WHAT_NOW}")
    known: Baseline = Counter()
    for entry in entries:  # pyright: ignore[reportUnknownVariableType]
        known[entry["file"], entry["code"], entry["text"]] += entry["count"]
    return known


def drop_known(findings: Iterable[LintFinding], baseline: Baseline, *, root: Path | None = None) -> list[LintFinding]:
    """Findings without those that are known. Lines that moved still are; a second copy of one is new.

    Args:
        findings: In the order of their lines: of equal ones, the later are the new ones.
        baseline: What is known.
        root: As for `write_baseline`.
    """
    left = Counter(baseline)
    new: list[LintFinding] = []
    for finding in findings:
        key = _key(finding, root)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    return new


def count_findings(findings: Iterable[LintFinding], *, root: Path | None = None) -> Baseline:
    """How many findings of each kind there are, as a baseline."""
    return Counter(_key(finding, root) for finding in findings)


def _key(finding: LintFinding, root: Path | None) -> tuple[str, str, str]:
    file, base = Path(finding.file).resolve(), (root or Path()).resolve()
    name = file.relative_to(base) if file.is_relative_to(base) else file
    return name.as_posix(), finding.rule.code, finding.text


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    fields: dict[str, Any] = entry  # pyright: ignore[reportUnknownVariableType]
    count = fields.get("count")
    texts = all(isinstance(fields.get(key), str) for key in ("file", "code", "text"))
    return texts and isinstance(count, int) and not isinstance(count, bool) and count > 0
