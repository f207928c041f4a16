"""`--fix`: rewrites what was found, again and again until nothing is left that can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from floatline.fixes import FixKind, Place, rewrite_places
from floatline.lint.engine import lint_text
from floatline.lint.finding import LintFinding
from floatline.lint.rule import Rule

if TYPE_CHECKING:
    from floatline.hardware import Hardware

_MOST_PASSES = 10  # each pass mends at least one place; expressions are seldom nested deeper


def fix_text(
    text: str,
    file: str,
    *,
    rules: Sequence[type[Rule]],
    on: Hardware | None = None,
    unsafe: bool = False,
) -> tuple[str, list[LintFinding]]:
    """The file with everything mended that can be, and the findings that were.

    Args:
        text: The file.
        file: Its name.
        rules: What is looked for.
        on: The hardware that the code is for.
        unsafe: Whether rewrites that are not the same function in exact arithmetic are made too.
    """
    fixed: list[LintFinding] = []
    for _ in range(_MOST_PASSES):
        found = [
            one
            for one in lint_text(text, file, rules=rules, on=on)
            if one.fix and (unsafe or one.rule.fix_safety == "safe")
        ]
        places = {_place(one): one for one in found}
        text, done = rewrite_places(text, list(places), unsafe=unsafe)
        if not done:
            break
        fixed += [places[place] for place in done]
    return text, fixed


def _place(finding: LintFinding) -> Place:
    kind = cast("FixKind", finding.fix)
    return Place(finding.line, finding.column, finding.end_line, finding.end_column, kind)
