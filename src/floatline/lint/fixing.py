"""What is told of what was found, and the rewrites that take it away."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from floatline.base.files import read_bounded
from floatline.fixes import FixKind, NodePlace, rewrite_places
from floatline.lint.engine import lint_text
from floatline.lint.notebooks import NOTEBOOK
from floatline.lint.reading.neighbours import LintedTree
from floatline.lint.rule import LintFinding, Rule

if TYPE_CHECKING:
    from floatline.hardware import Hardware

_MOST_PASSES = 10  # each pass fixes at least one place; expressions are seldom nested deeper
_IN_TESTS_TOO = ("FL001", "FL214")  # a file that cannot be read, and old names, are what they are in a test, too
_LARGEST = 2_000_000  # bytes; what is larger was not written by hand
_LARGEST_NOTEBOOK = 50_000_000  # its pictures are in it


@dataclass(frozen=True)
class Telling:
    """Which findings are told.

    Args:
        half: Whether all are asked for.
        in_pure_half: Files that put a model into FP16. That others of a project do says too little: of 13 findings that
            were told for it and judged, 3 were right.
        is_for_16_bits: Whether somebody may run the project in 16 bits: it is small, or shows it.
        unnamed: Functions and classes that nothing in a project names: nobody there runs them.
        tests: Files of tests in the folders that are linted: what they train is thrown away.
    """

    half: bool
    in_pure_half: frozenset[str] = frozenset()
    is_for_16_bits: bool = True
    unnamed: frozenset[tuple[str, str]] = frozenset()
    tests: frozenset[str] = frozenset()

    def tells(self, finding: LintFinding) -> bool:
        """Whether a finding is told."""
        if self.half:
            return True
        if not self.is_for_16_bits and finding.holds != "any":
            return False
        file = file_of(finding)
        if file in self.tests and finding.rule.code not in _IN_TESTS_TOO:
            return False
        if finding.owners and all((file, owner) in self.unnamed for owner in finding.owners):
            return False
        return finding.is_told(shows_half=file in self.in_pure_half)


def file_of(finding: LintFinding) -> str:
    """The file, of a cell that of its notebook."""
    name, is_cell, _ = finding.file.rpartition(":cell ")
    return name if is_cell else finding.file


@dataclass(frozen=True)
class Fixes:
    """Rewrites; none of them is written.

    Args:
        changes: File, text before and text after.
        fixed: The findings that they take away.
        left: All that is found in the changed texts.
    """

    changes: tuple[tuple[str, str, str], ...] = ()
    fixed: tuple[LintFinding, ...] = ()
    left: tuple[LintFinding, ...] = ()


def fix_files(
    told: Sequence[LintFinding],
    telling: Telling,
    *,
    rules: Sequence[type[Rule]],
    on: Hardware | None = None,
    unsafe: bool = False,
    neighbours: LintedTree | None = None,
) -> Fixes:
    """The rewrites for what is told, file by file; notebooks are left alone.

    Args:
        told: What was found and is told.
        telling: What is told of a changed file.
        rules: As in `fix_text`.
        on: As in `fix_text`.
        unsafe: As in `fix_text`.
        neighbours: As in `lint_text`.
    """
    changes: list[tuple[str, str, str]] = []
    fixed: list[LintFinding] = []
    left: list[LintFinding] = []
    by_file: dict[str, list[LintFinding]] = {}
    for one in told:
        by_file.setdefault(one.file, []).append(one)
    for file, found in by_file.items():
        if file_of(found[0]).endswith(NOTEBOOK) or not any(_can_fix(one, unsafe=unsafe) for one in found):
            continue
        text = read_text(file)
        look = partial(lint_text, file=file, rules=rules, on=on, half=True, neighbours=neighbours)
        after, done, after_found = _fix_in_passes(text, look, unsafe=unsafe, tells=telling.tells, found=found)
        if after != text:
            changes.append((file, text, after))
            fixed += done
            left += look(after) if after_found is None else after_found
    return Fixes(tuple(changes), tuple(fixed), tuple(left))


def fix_text(
    text: str,
    file: str,
    *,
    rules: Sequence[type[Rule]],
    on: Hardware | None = None,
    unsafe: bool = False,
    tells: Callable[[LintFinding], bool] = lambda _: True,
    found: Sequence[LintFinding] | None = None,
    passes: int = _MOST_PASSES,
    neighbours: LintedTree | None = None,
) -> tuple[str, list[LintFinding]]:
    """The file with everything fixed that can be, and the findings that were.

    Args:
        text: The file.
        file: Its name.
        rules: What is looked for.
        on: The hardware that the code is for.
        unsafe: Whether rewrites that are not the same function in exact arithmetic are made too.
        tells: What is told: nothing else is fixed.
        found: What is found in the text, where that is known.
        passes: How often what is left after a pass is looked at again, at most.
        neighbours: As in `lint_text`.
    """
    look = partial(lint_text, file=file, rules=rules, on=on, half=True, neighbours=neighbours)
    text, fixed, _ = _fix_in_passes(text, look, unsafe=unsafe, tells=tells, found=found, passes=passes)
    return text, fixed


def _fix_in_passes(
    text: str,
    look: Callable[[str], Sequence[LintFinding]],
    *,
    unsafe: bool,
    tells: Callable[[LintFinding], bool],
    found: Sequence[LintFinding] | None,
    passes: int = _MOST_PASSES,
) -> tuple[str, list[LintFinding], Sequence[LintFinding] | None]:
    """As `fix_text`, and what was found in the result; None where it was not looked at again."""
    fixed: list[LintFinding] = []
    for _ in range(passes):
        if found is None:
            found = look(text)
        places = {_place(one): one for one in found if _can_fix(one, unsafe=unsafe) and tells(one)}
        settings = [place for place in places if place.kind == "fp32-setting"]
        if settings:
            text, done = _widen_settings(text, settings)
        else:
            text, done = rewrite_places(text, list(places), unsafe=unsafe) if places else (text, [])
        if not done:
            break
        fixed += [places[place] for place in done]
        found = None
    return text, fixed, found


@dataclass(frozen=True)
class Replacement:
    """Lines of a file, counted from 1, that others take the place of.

    Args:
        line: The first one.
        num: How many go; 0 puts the others before the first one.
        text: What comes, without a line break at its end.
        last: The last one that goes; '' where none does.
    """

    line: int
    num: int
    text: str
    last: str = ""


def replace_lines(finding: LintFinding) -> Replacement | None:
    """What the rewrite of one finding changes; None where there is none, or in a notebook."""
    if not finding.fix or file_of(finding).endswith(NOTEBOOK):
        return None
    text = read_text(finding.file)
    after, _ = fix_text(text, finding.file, rules=(finding.rule,), unsafe=True, found=[finding], passes=1)
    old, new = text.split("\n"), after.split("\n")
    same = _count_same(old, new)
    if same == len(old) == len(new):
        return None
    behind = _count_same(old[same:][::-1], new[same:][::-1])
    gone, come = old[same : len(old) - behind], new[same : len(new) - behind]
    return Replacement(same + 1, len(gone), "\n".join(come), gone[-1] if gone else "")


def _count_same(one: Sequence[str], other: Sequence[str]) -> int:
    apart = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(apart, min(len(one), len(other)))


_IN_HALF = re.compile(r"\b(float16|half|fp16|16-true)\b")


def _widen_settings(text: str, places: Sequence[NodePlace]) -> tuple[str, list[NodePlace]]:
    """The text with FP32 instead of FP16 in settings, which may stand in any format."""
    lines, done = text.split("\n"), list[NodePlace]()
    for place in places:
        line = lines[place.line - 1]
        start, end = place.column - 1, place.end_column - 1 if place.end_line == place.line else len(line)
        found = [*_IN_HALF.finditer(line, start, end)]
        if found:
            wide = "16-mixed" if found[-1].group() == "16-true" else "float32"
            lines[place.line - 1] = f"{line[: found[-1].start()]}{wide}{line[found[-1].end() :]}"
            done.append(place)
    return "\n".join(lines), done


def _can_fix(finding: LintFinding, *, unsafe: bool) -> bool:
    return bool(finding.fix) and (unsafe or finding.rule.fix_safety == "safe")


def _place(finding: LintFinding) -> NodePlace:
    kind = cast("FixKind", finding.fix)
    return NodePlace(finding.line, finding.column, finding.end_line, finding.end_column, kind)


def read_text(file: str) -> str:
    """The text of a file that is not too large to have been written by hand."""
    most = _LARGEST_NOTEBOOK if file.endswith(NOTEBOOK) else _LARGEST
    return read_bounded(Path(file), most=most).decode("utf-8-sig")


def read_part(file: str) -> str:
    """What of a file that is no text can be read as such; '' where it may not be opened or is too large."""
    try:
        return read_bounded(Path(file), most=_LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""
