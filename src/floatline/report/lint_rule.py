"""One lint rule: for a terminal, for programs, and as its page of the documentation. Computes nothing."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from floatline.lint.rule import read_examples

if TYPE_CHECKING:
    from rich.console import Console

    from floatline.lint.rule import Rule

_WIDTH = 88
_LANGUAGES = {".py": "py", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def print_rule(console: Console, rule: type[Rule]) -> None:
    """Print what it flags, why, what to write instead, with an example."""
    from rich.text import Text

    console.print(Text.assemble((rule.code, "bold cyan"), "  ", (rule.name, "bold cyan"), "  ", (_title(rule), "bold")))
    for heading, text in _sections(rule):
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
        "title": _title(rule),
        "cause": rule.cause.id if rule.cause else None,
        "message": rule.message,
        "fix": rule.advice,
        "fix_safety": rule.fix_safety,
        "explanation": inspect.cleandoc(rule.__doc__ or ""),
        "bad": [{"source": bad.source, "fixed": bad.fixed, "file": bad.file} for bad in read_examples(rule.bad)],
        "good": [good.source for good in read_examples(rule.good)],
    }


def rule_page(rule: type[Rule]) -> str:
    """The rule as Markdown; its examples are the ones that are tested."""
    parts = [f"# {rule.code} {rule.name}\n", f"{_title(rule)}.\n" if not _title(rule).endswith(".") else _title(rule)]
    for heading, text in _sections(rule):
        parts.append(f"## {heading}\n\n{text}\n" if heading else f"{text}\n")
    parts.append(f"Instead: {rule.advice}\n")
    parts.append("## Flagged\n")
    for bad in read_examples(rule.bad):
        parts.append(_block(bad.source, bad.file))
        if bad.fixed is not None:
            parts.append("becomes\n")
            parts.append(_block(bad.fixed, bad.file))
    parts.append("## Not flagged\n")
    parts += [_block(good.source, good.file) for good in read_examples(rule.good)]
    if rule.cause is not None:
        parts.append(f"Cause: [{rule.cause.id}](../causes/{rule.cause.id}.md). ")
    parts.append(f"To keep a line as it is: `# floatline: allow[{rule.name}]`\n")
    return "\n".join(parts)


def _title(rule: type[Rule]) -> str:
    return rule.title or (rule.cause.title if rule.cause else rule.message)


def _sections(rule: type[Rule]) -> list[tuple[str, str]]:
    """The headings of the docstring, with what stands under each; the first has none."""
    text = inspect.cleandoc(rule.__doc__ or "")
    first, *rest = text.split("\n## ")
    return [("", first.strip()), *((part.split("\n", 1)[0].strip(), part.split("\n", 1)[-1].strip()) for part in rest)]


def _block(code: str, file: str) -> str:
    name = "" if file == "example.py" else f"{file}:\n\n"
    return f"{name}```{_LANGUAGES.get(PurePath(file).suffix, 'text')}\n{code}\n```\n"
