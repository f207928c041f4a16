"""The engine: one walk over a file's tree, and every rule that wants a node sees it."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from floatline.hardware import Hardware
from floatline.lint.baseline import drop_allowed, read_allowed
from floatline.lint.configs import CONFIG_ENDINGS, lint_config
from floatline.lint.reading.neighbours import LintedTree
from floatline.lint.reading.source import Source
from floatline.lint.reading.under_autocast import shows_pure_half
from floatline.lint.rule import LintFinding, Rule

# A file that names none of these trains nothing.
_SIGNS_OF_TRAINING = ("torch", "Trainer", "TrainingArguments", "Accelerator", "deepspeed", "lightning")


def lint_text(
    text: str,
    file: str = "example.py",
    *,
    rules: Sequence[type[Rule]],
    on: Hardware | None = None,
    half: bool = False,
    neighbours: LintedTree | None = None,
) -> list[LintFinding]:
    """The findings of one file, in the order of its lines.

    A Python file that does not parse has one.

    Args:
        text: The file.
        file: Its name; its ending says what it is.
        rules: What is looked for.
        on: The hardware that the code is for, where it is known.
        half: Whether all is told: also what holds in pure half, in a file that shows none, and for some input only.
        neighbours: The other files of its tree; None where nothing is known of them.
    """
    if PurePath(file).suffix in CONFIG_ENDINGS:
        return lint_config(text, file, rules=rules, on=on)
    if not names_training(text):
        return []
    wanted = [rule for rule in rules if any(word in text for word in rule.words or rule.calls)]
    if not wanted:
        return []
    try:
        source = Source(text, file, neighbours=neighbours)
    except SyntaxError as error:
        if _may_be_newer(text):
            return []
        told = tell_unread(text, file, error, rules=rules)
        return drop_allowed(told, *read_allowed(text.split("\n"), error.lineno or 1))
    except (ValueError, RecursionError, MemoryError) as error:  # a thousand brackets deep
        return tell_unread(text, file, error, rules=rules)
    made = [rule(source, on=on) for rule in wanted]
    with contextlib.suppress(RecursionError):  # an expression of a thousand dots; what was found before it counts
        _walk(source, made)
    findings = [finding for rule in made for finding in rule.found]
    if not half:
        shows_half = shows_pure_half(text)
        findings = [finding for finding in findings if finding.is_told(shows_half=shows_half)]
    if not findings:
        return findings
    first = source.tree.body[0].lineno if source.tree.body else 1
    findings = drop_allowed(list(dict.fromkeys(findings)), *read_allowed(source.lines, first))
    return sorted(findings, key=lambda one: (one.line, one.column, one.rule.code))


def names_training(text: str) -> bool:
    """Whether a file names anything that trains."""
    return any(sign in text for sign in _SIGNS_OF_TRAINING)


_NEWER = re.compile(r"^\s*(class|def|type)\s+\w+\[|^\s*except\*", re.MULTILINE)


def _may_be_newer(text: str) -> bool:
    """Whether it may be Python that is newer than this one: it has syntax of 3.11, 3.12 or later."""
    return sys.version_info < (3, 14) and _NEWER.search(text) is not None


def tell_unparsed(text: str, file: str, *, rules: Sequence[type[Rule]]) -> list[LintFinding]:
    """The finding about a Python file that was asked about by its name, says nothing of training and does not parse."""
    try:
        if PurePath(file).suffix == ".py" and not names_training(text):
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [] if _may_be_newer(text) else tell_unread(text, file, error, rules=rules, is_named=True)
    return []


def tell_unread(
    text: str, file: str, error: Exception, *, rules: Sequence[type[Rule]], is_named: bool = False
) -> list[LintFinding]:
    """The finding about a file that could not be read, if it is asked for and the file is, or may be, about training.

    Args:
        text: What could be read of it.
        file: Its name.
        error: Why not all could.
        rules: What is looked for.
        is_named: Whether the file itself was asked about, and not the folder around it.
    """
    if not is_named and not names_training(text) and not isinstance(error, PermissionError):
        return []
    line, column, why = 1, 1, str(error) or "it is nested too deeply"
    if isinstance(error, SyntaxError):
        line, column, why = error.lineno or 1, max(1, error.offset or 1), error.msg
    lines = text.split("\n")
    shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    reader = "Python" if isinstance(error, SyntaxError) else "floatline"
    seen = f"{why}: {reader} cannot read this file, and nothing in it was looked at"
    return [
        LintFinding(rule, file, line, column, line, column, seen, rule.advice, text=shown)
        for rule in rules
        if rule.code == "FL001"
    ]


def _walk(source: Source, rules: Sequence[Rule]) -> None:
    """Show every node to the methods that want its kind."""
    visits: dict[type[ast.AST], list[Callable[[Any], None]]] = {}
    by_call: dict[str, list[Callable[[Any], None]]] = {}
    for rule in rules:
        for name in dir(rule):
            kind = getattr(ast, name.removeprefix("visit_"), None) if name.startswith("visit_") else None
            if kind is None:  # no node: rules about settings and loops ask for those themselves
                continue
            if name == "visit_Call":
                for call in rule.calls:
                    by_call.setdefault(call, []).append(rule.visit_Call)  # type: ignore[attr-defined] # pyright: ignore
            else:
                visits.setdefault(kind, []).append(getattr(rule, name))
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if isinstance(node, ast.Call):
            for visit in by_call.get(source.call_name(node), ()):
                visit(node)
        for visit in visits.get(kind, ()):
            visit(node)
        for field in node._fields:
            child = getattr(node, field, None)
            if isinstance(child, list):
                waiting.extend(one for one in child if isinstance(one, ast.AST))  # pyright: ignore
            elif isinstance(child, ast.AST):
                waiting.append(child)
