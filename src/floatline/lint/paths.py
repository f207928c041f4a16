"""Files and folders to findings, over all cores."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from floatline.base.files import read_bounded
from floatline.errors import LintError
from floatline.fixes import FixKind, NodePlace, rewrite_places
from floatline.lint.configs import CONFIG_ENDINGS
from floatline.lint.engine import lint_text
from floatline.lint.notebooks import NOTEBOOK, place_in_cells, read_notebook
from floatline.lint.reading.under_autocast import shows_16_bits, shows_pure_half, trains_in_pure_half
from floatline.lint.rule import LintFinding, Rule
from floatline.lint.rules import choose_rules
from floatline.lint.settings import Settings

if TYPE_CHECKING:
    from floatline.hardware import Hardware

_MOST_PASSES = 10  # each pass fixes at least one place; expressions are seldom nested deeper


def fix_text(
    text: str,
    file: str,
    *,
    rules: Sequence[type[Rule]],
    on: Hardware | None = None,
    unsafe: bool = False,
    half: bool = False,
) -> tuple[str, list[LintFinding]]:
    """The file with everything fixed that can be, and the findings that were.

    Args:
        text: The file.
        file: Its name.
        rules: What is looked for.
        on: The hardware that the code is for.
        unsafe: Whether rewrites that are not the same function in exact arithmetic are made too.
        half: As in `lint_text`.
    """
    fixed: list[LintFinding] = []
    for _ in range(_MOST_PASSES):
        found = [
            one
            for one in lint_text(text, file, rules=rules, on=on, half=half)
            if one.fix and (unsafe or one.rule.fix_safety == "safe")
        ]
        places = {_place(one): one for one in found}
        text, done = rewrite_places(text, list(places), unsafe=unsafe)
        if not done:
            break
        fixed += [places[place] for place in done]
    return text, fixed


def _place(finding: LintFinding) -> NodePlace:
    kind = cast("FixKind", finding.fix)
    return NodePlace(finding.line, finding.column, finding.end_line, finding.end_column, kind)


_SKIPPED_FOLDERS = frozenset(
    ".git .hg .venv venv node_modules __pycache__ .tox .mypy_cache .ruff_cache build dist".split()  # noqa: SIM905
)
_LARGEST = 2_000_000  # bytes; what is larger was not written by hand
PROJECT = 20  # files from which on a project that shows no 16 bits is not meant for them
_FILES_FOR_A_PROCESS = 200  # starting one costs as much as linting about so many


@dataclass(frozen=True)
class LintResult:
    """What was found.

    Args:
        findings: By file and line.
        num_files: Files that were read.
        num_lines: Their lines.
        changes: File, text before and text after, of the files that `fix` changes. None of them is written.
        fixed: The findings that those changes take away.
        unread: Files that could not be read, with the reason.
        only_in_half: Findings that are not told, since nothing shows that they matter: what holds in pure half only, or
            for an input of 16 bits, and of a large project without a word of 16 bits all that is about numbers.
        trains_in_half: Whether a file shows that the project trains weights in FP16.
        shows_16_bits: Whether a file shows that the project is run in 16 bits.
    """

    findings: tuple[LintFinding, ...]
    num_files: int
    num_lines: int
    changes: tuple[tuple[str, str, str], ...] = ()
    fixed: tuple[LintFinding, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    only_in_half: tuple[LintFinding, ...] = ()
    trains_in_half: bool = False
    shows_16_bits: bool = False


def lint_paths(
    paths: Iterable[str | Path],
    *,
    settings: Settings | None = None,
    fix: bool = False,
    unsafe: bool = False,
    jobs: int | None = None,
) -> LintResult:
    """Look at files and folders. Nothing is written.

    Args:
        paths: Python files, notebooks, configurations (.yaml, .yml, .json, .toml), or folders of them.
        settings: What is looked for; None is everything.
        fix: Whether safe rewrites are worked out too; they are in `changes`.
        unsafe: Whether others are as well.
        jobs: Processes; None is as many as there are cores, and one for few files.

    Raises:
        LintError: A path is not there, or a setting names no rule.
    """
    settings = settings or Settings()
    rules = choose_rules(settings.select, settings.ignore)
    hardware = _find_hardware(settings.on)
    files = find_files(paths, exclude=settings.exclude, root=settings.root)
    jobs = jobs if jobs is not None else min(os.cpu_count() or 1, 1 + len(files) // _FILES_FOR_A_PROCESS)
    task = _Task(tuple(rules), hardware, fix, unsafe, settings.half)
    if jobs <= 1:
        parts = [task(files)]
    else:
        # Many small shares: a folder of large files does not keep one process busy alone.
        size = max(1, len(files) // (jobs * 8))
        shares = [files[start : start + size] for start in range(0, len(files), size)]
        with ProcessPoolExecutor(jobs) as pool:
            parts = list(pool.map(task, shares))
    findings = [one for part in parts for one in part.findings]
    rest = [one for part in parts for one in part.only_in_half]
    trains = any(part.trains_in_half for part in parts)
    if len(files) >= PROJECT and not settings.half and not any(part.shows_16_bits for part in parts):
        rest += [one for one in findings if one.holds != "any"]  # a project that nobody runs in 16 bits
        findings = [one for one in findings if one.holds == "any"]
    if trains and any(one.holds == "half" for one in rest):
        order = {file: number for number, file in enumerate(files)}
        findings = [*findings, *(one for one in rest if one.holds == "half")]
        findings = sorted(findings, key=lambda one: (order[_file_of(one)], one.line, one.column))
        rest = [one for one in rest if one.holds != "half"]
    return LintResult(
        findings=tuple(findings),
        num_files=sum(part.num_files for part in parts),
        num_lines=sum(part.num_lines for part in parts),
        changes=tuple(one for part in parts for one in part.changes),
        fixed=tuple(one for part in parts for one in part.fixed),
        unread=tuple(one for part in parts for one in part.unread),
        only_in_half=tuple(rest),
        trains_in_half=trains,
        shows_16_bits=any(part.shows_16_bits for part in parts),
    )


def _file_of(finding: LintFinding) -> str:
    name, is_cell, _ = finding.file.rpartition(":cell ")
    return name if is_cell else finding.file


def find_files(paths: Iterable[str | Path], *, exclude: Sequence[str] = (), root: Path | None = None) -> list[str]:
    """The files to look at, sorted within each path that was given.

    Raises:
        LintError: A path is not there.
    """
    found: dict[str, None] = {}
    endings = (".py", NOTEBOOK, *CONFIG_ENDINGS)
    for given in paths:
        path = Path(given)
        if path.is_file():
            found[str(given)] = None
            continue
        if not path.is_dir():
            raise LintError(f"Path {str(given)!r} is not there. Give a file or a folder.")
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
            for name in sorted(names):
                # A link may lead anywhere, and --fix would follow it; a pipe never ends.
                inside = Path(folder, name)
                if (
                    name.endswith(endings)
                    and name != "package-lock.json"
                    and inside.is_file()
                    and not inside.is_symlink()
                ):
                    found[str(inside)] = None
    return [file for file in found if not _is_excluded(file, exclude, root)]


def _is_excluded(file: str, exclude: Sequence[str], root: Path | None) -> bool:
    if not exclude:
        return False
    path = Path(file).resolve()
    base = (root or Path()).resolve()
    name = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
    patterns = [one for pattern in exclude for one in (pattern, f"{pattern.rstrip('/')}/*")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _find_hardware(name: str) -> Hardware | None:
    if not name:
        return None
    from floatline.hardware import find_hardware

    return find_hardware(name)


@dataclass(frozen=True)
class _Task:
    """One process's work: a share of the files."""

    rules: tuple[type[Rule], ...]
    hardware: Hardware | None
    fix: bool
    unsafe: bool
    half: bool

    def __call__(self, files: Sequence[str]) -> LintResult:
        findings: list[LintFinding] = []
        changes: list[tuple[str, str, str]] = []
        fixed: list[LintFinding] = []
        unread: list[tuple[str, str]] = []
        rest: list[LintFinding] = []
        num_lines, trains, shows = 0, False, False
        for file in files:
            places: list[tuple[int, int]] = []
            try:
                text = _read(file)
                if file.endswith(NOTEBOOK):
                    text, places = read_notebook(text)
            except (OSError, ValueError, RecursionError) as error:
                unread.append((file, str(error)))
                continue
            num_lines += text.count("\n")
            has_half = shows_pure_half(text)
            trains, shows = trains or trains_in_pure_half(text), shows or has_half or shows_16_bits(text)
            found = lint_text(text, file, rules=self.rules, on=self.hardware, half=True)
            unread += [(file, one.seen) for one in found if one.rule.code == "FL001"]
            if places:
                found = place_in_cells(found, file, places)
            if self.fix and not places and any(one.fix for one in found):
                after, done = fix_text(
                    text, file, rules=self.rules, on=self.hardware, unsafe=self.unsafe, half=self.half
                )
                if after != text:
                    changes.append((file, text, after))
                    fixed += done
                    found = lint_text(after, file, rules=self.rules, on=self.hardware, half=True)
            told = [one for one in found if self.half or one.is_told(shows_half=has_half)]
            findings += told
            rest += [one for one in found if one not in told]
        return LintResult(
            tuple(findings),
            len(files) - len(unread),
            num_lines,
            tuple(changes),
            tuple(fixed),
            tuple(unread),
            tuple(rest),
            trains,
            shows,
        )


def _read(file: str) -> str:
    return read_bounded(Path(file), most=_LARGEST).decode("utf-8-sig")
