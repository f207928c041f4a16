"""Files and folders to findings, over all cores."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from floatline.errors import LintError
from floatline.lint.configs import CONFIG_ENDINGS
from floatline.lint.engine import lint_text, tell_unparsed, tell_unread
from floatline.lint.fixing import Fixes, Telling, file_of, fix_files, read_part, read_text
from floatline.lint.notebooks import NOTEBOOK, place_in_cells, read_notebook
from floatline.lint.reading.mentions import find_unnamed
from floatline.lint.reading.neighbours import LintedTree
from floatline.lint.reading.under_autocast import shows_16_bits, shows_pure_half, trains_in_pure_half
from floatline.lint.rule import LintFinding, Rule
from floatline.lint.rules import choose_rules
from floatline.lint.settings import Settings

if TYPE_CHECKING:
    from floatline.hardware import Hardware

_BUILT = ("node_modules", "__pycache__", ".tox", ".mypy_cache", ".ruff_cache", "build", "dist", "floatline-runs")
_SKIPPED_FOLDERS = frozenset((".git", ".hg", ".venv", "venv", *_BUILT))
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
    on_progress: Callable[[int, int], None] | None = None,
) -> LintResult:
    """Look at files and folders. Nothing is written.

    Args:
        paths: Python files, notebooks, configurations (.yaml, .yml, .json, .toml), shell scripts (.sh, .bash), or
            folders of them.
        settings: What is looked for; None is everything.
        fix: Whether safe rewrites are worked out too; they are in `changes`.
        unsafe: Whether others are as well.
        jobs: Processes; None is as many as there are cores, and one for few files.
        on_progress: Called with the number of files that were read, and of all, on the way.

    Raises:
        LintError: A path is not there, or a setting names no rule.
    """
    settings = settings or Settings()
    rules = choose_rules(settings.select, settings.ignore, half=settings.half)
    hardware = _find_hardware(settings.on)
    paths = [*paths]
    files = find_files(paths, exclude=settings.exclude, root=settings.root)
    tests = find_tests(paths, files)
    jobs = jobs if jobs is not None else min(os.cpu_count() or 1, 1 + len(files) // _FILES_FOR_A_PROCESS)
    neighbours = LintedTree(files)
    task = _Task(tuple(rules), hardware, neighbours, frozenset(map(str, paths)))
    parts: list[_Part] = []
    for part in _in_shares(task, files, jobs):
        parts.append(part)
        if on_progress is not None:
            on_progress(sum(one.num_given for one in parts), len(files))
    found = [one for part in parts for one in part.found]
    telling = Telling(
        half=settings.half,
        in_pure_half=frozenset(file for part in parts for file in part.in_pure_half),
        is_for_16_bits=len(files) < PROJECT or any(part.shows_16_bits for part in parts),
        tests=tests,
        unnamed=_unnamed(found, files) if not settings.half and len(files) >= PROJECT else frozenset(),
    )
    told = [one for one in found if telling.tells(one)]
    fixes = fix_files(told, telling, rules=rules, on=hardware, unsafe=unsafe, neighbours=neighbours) if fix else Fixes()
    changed = {file for file, _, _ in fixes.changes}
    if changed:
        order = {file: number for number, file in enumerate(files)}
        kept = [one for one in found if one.file not in changed]
        found = sorted([*kept, *fixes.left], key=lambda one: order[file_of(one)])
        told = [one for one in found if telling.tells(one)]
    return LintResult(
        findings=tuple(told),
        num_files=sum(part.num_files for part in parts),
        num_lines=sum(part.num_lines for part in parts),
        changes=fixes.changes,
        fixed=fixes.fixed,
        unread=tuple(one for part in parts for one in part.unread),
        only_in_half=tuple(one for one in found if not telling.tells(one)),
        trains_in_half=any(part.trains_in_half for part in parts),
        shows_16_bits=any(part.shows_16_bits for part in parts),
    )


def _unnamed(found: Sequence[LintFinding], files: Sequence[str]) -> frozenset[tuple[str, str]]:
    """Functions and classes with findings that nothing in a project names."""
    return find_unnamed(((file_of(one), owner) for one in found for owner in one.owners), files, read_text)


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


def find_tests(paths: Iterable[str | Path], files: Iterable[str]) -> frozenset[str]:
    """Files of tests, by their names within the folders that were given; a file that was itself given is none."""
    folders = [str(Path(path)) for path in paths if Path(path).is_dir()]
    tests = set[str]()
    for file in files:
        inside = [
            Path(file).relative_to(one) for one in folders if "test" in file.lower() and Path(file).is_relative_to(one)
        ]
        if any(_names_test(one) for one in inside):
            tests.add(file)
    return frozenset(tests - {str(path) for path in paths})


def _names_test(path: Path) -> bool:
    in_folder = not {"test", "tests"}.isdisjoint(part.lower() for part in path.parts[:-1])
    return in_folder or path.stem.startswith("test_") or path.stem.endswith("_test") or path.stem == "conftest"


def _is_excluded(file: str, exclude: Sequence[str], root: Path | None) -> bool:
    if not exclude:
        return False
    path = Path(file).resolve()
    base = (root or Path()).resolve()
    name = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
    patterns = [one for pattern in exclude for one in (pattern, f"{pattern.rstrip('/')}/*")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _in_shares(task: _Task, files: Sequence[str], jobs: int) -> Iterator[_Part]:
    """What each share of the files has, in their order."""
    # Many small shares: a folder of large files does not keep one process busy alone.
    size = max(1, len(files) // (jobs * 8)) if jobs > 1 else _FILES_FOR_A_PROCESS // 8
    shares = [files[start : start + size] for start in range(0, len(files), size)]
    if jobs <= 1:
        yield from map(task, shares)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(task, shares)


def _find_hardware(name: str) -> Hardware | None:
    if not name:
        return None
    from floatline.hardware import find_hardware

    return find_hardware(name)


@dataclass
class _Part:
    """What one process found in its share of the files."""

    num_given: int
    found: list[LintFinding] = field(default_factory=list[LintFinding])
    num_files: int = 0
    num_lines: int = 0
    unread: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    in_pure_half: list[str] = field(default_factory=list[str])
    trains_in_half: bool = False
    shows_16_bits: bool = False


@dataclass(frozen=True)
class _Task:
    """One process's work: a share of the files."""

    rules: tuple[type[Rule], ...]
    hardware: Hardware | None
    neighbours: LintedTree
    named: frozenset[str]

    def __call__(self, files: Sequence[str]) -> _Part:
        part = _Part(len(files))
        for file in files:
            self._read(file, part)
        return part

    def _read(self, file: str, part: _Part) -> None:
        try:
            text, places = read_text(file), []
            if file.endswith(NOTEBOOK):
                text, places = read_notebook(text)
        except (OSError, ValueError, RecursionError) as error:
            part.unread.append((file, str(error)))
            is_named = file in self.named
            part.found += tell_unread(read_part(file), file, error, rules=self.rules, is_named=is_named)
            return
        found = lint_text(text, file, rules=self.rules, on=self.hardware, half=True, neighbours=self.neighbours)
        found = found or (tell_unparsed(text, file, rules=self.rules) if file in self.named else [])
        part.unread += [(file, one.seen) for one in found if one.rule.code == "FL001"]
        part.found += place_in_cells(found, file, places) if places else found
        part.num_files += 1
        part.num_lines += text.count("\n")
        has_half = shows_pure_half(text)
        part.in_pure_half += [file] if has_half else []
        part.trains_in_half = part.trains_in_half or trains_in_pure_half(text)
        part.shows_16_bits = part.shows_16_bits or has_half or shows_16_bits(text)
