"""Which files a run has written, and the metric that is in them."""

from __future__ import annotations

import contextlib
import glob
import math
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from floatline.errors import ComparisonError, suggest
from floatline.validation.metrics.mlflow import metric_folder, read_database, read_metric_file
from floatline.validation.metrics.recorded import Recorded
from floatline.validation.metrics.tensorboard import read_event_file
from floatline.validation.metrics.text import read_csv, read_json, read_json_lines
from floatline.validation.metrics.wandb import read_wandb_file

KINDS = "JSON lines, JSON, CSV, TensorBoard event files, W&B runs (.wandb), MLflow (mlruns or mlflow.db)"
MOST_FILES = 200_000
# Where programs keep what is no result of theirs.
LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
SAME = 1e-6
"""Two files may disagree by this much of a value: TensorBoard keeps float32."""

Seen = dict[Path, tuple[int, int]]
"""Size and time of change of each file that may hold metrics."""


def reader_of(path: Path) -> Callable[[Path], list[Recorded]] | None:
    """What reads such a file, by its name and place; None where it is no metric file."""
    if "tfevents" in path.name:
        return lambda path: [read_event_file(path)]
    if path.name == "mlflow.db":
        return read_database
    by_ending: dict[str, Callable[[Path], Recorded]] = {
        ".wandb": read_wandb_file,
        ".jsonl": read_json_lines,
        ".ndjson": read_json_lines,
        ".json": read_json,
        ".csv": read_csv,
        ".tsv": read_csv,
    }
    reader = by_ending.get(path.suffix.lower())
    if "metrics" in path.parts[:-1] and metric_folder(path) is not None:
        reader = read_metric_file
    return None if reader is None else lambda path: [reader(path)]


def read_metrics(path: Path) -> list[Recorded]:
    """Every run that a file holds. A name that says nothing is read as a log with JSON lines in it.

    Raises:
        ComparisonError: The file is not there, or cannot be read as what its name says.
    """
    reader = reader_of(path)
    if reader is None and path.suffix == ".db":
        reader = read_database
    try:
        return [read_json_lines(path, strict=False)] if reader is None else reader(path)
    except OSError as error:
        raise ComparisonError(f"'{path}' cannot be read: {error.strerror}. Check the path.") from None


def list_files(folder: Path, *, leave_out: Sequence[Path] = ()) -> Seen:
    """Every file below the folder that may hold metrics, with size and time of change.

    Links, hidden folders and environments are left out.

    Raises:
        ComparisonError: There are too many files to look through.
    """
    found: Seen = {}
    waiting, num, beyond = [folder], 0, {path.resolve() for path in leave_out}
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:
            continue  # a folder that went away, or is not ours to read
        for entry in entries:
            num += 1
            if num > MOST_FILES:
                raise ComparisonError(
                    f"'{folder}' has more than {MOST_FILES:,} files. Say which one has the metric: --metric-file."
                )
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and entry.name not in LEFT_OUT and path.resolve() not in beyond:
                    waiting.append(path)
            elif entry.is_file(follow_symlinks=False) and reader_of(path) is not None:
                found[path] = _state(path)
    return found


def match_files(pattern: str, cwd: Path) -> Seen:
    """Files that a pattern names, relative to the working folder; `**` is any number of folders."""
    names = glob.glob(pattern, root_dir=cwd, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    paths = (cwd / name for name in names)
    return {path: _state(path) for path in sorted(paths) if path.is_file()}


def changed_files(before: Seen, after: Seen) -> list[Path]:
    """Files that are new, or not as they were."""
    return sorted(path for path, state in after.items() if before.get(path) != state)


def read_all(paths: Iterable[Path], *, strict: bool) -> tuple[list[Recorded], list[str]]:
    """Every run of every file, and why some could not be read; with `strict` that is an error."""
    found: list[Recorded] = []
    problems: list[str] = []
    for path in paths:
        with contextlib.nullcontext() if strict else _noting(problems):
            found += read_metrics(path)
    return found, problems


@contextlib.contextmanager
def _noting(problems: list[str]) -> Generator[None]:
    try:
        yield
    except ComparisonError as error:
        problems.append(str(error))


def choose_recorded(runs: Sequence[Recorded], metric: str, *, where: str) -> Recorded:
    """The recorded run that has the metric; where several have it, they must agree, and the longest curve is taken.

    Args:
        runs: What was read.
        metric: Name of the metric.
        where: Where was looked, for the error.

    Raises:
        ComparisonError: None has it, or they disagree.
    """
    having = [(run, name) for run in runs for name in [run.spelling(metric)] if name is not None]
    if not having:
        raise ComparisonError(_not_found(runs, metric, where))
    having = _join_parts(having)
    first, name = having[0]
    for other, spelling in having[1:]:
        if not _same(first.last(name), other.last(spelling)):
            raise ComparisonError(
                f"Metric '{metric}' ends at {first.last(name):.6g} in '{first.path}' and at "
                f"{other.last(spelling):.6g} in '{other.path}'. Say which file: --metric-file."
            )
    return max(having, key=lambda entry: len(entry[0].curve(entry[1])))[0]


def _join_parts(having: list[tuple[Recorded, str]]) -> list[tuple[Recorded, str]]:
    """Event files of one folder are one run, which TensorBoard shows as one curve."""
    joined: list[tuple[Recorded, str]] = []
    by_folder: dict[Path, Recorded] = {}
    for run, name in sorted(having, key=lambda entry: str(entry[0].path)):
        if run.kind != "TensorBoard":
            joined.append((run, name))
        elif run.path.parent not in by_folder:
            by_folder[run.path.parent] = run
            joined.append((run, name))
        else:
            by_folder[run.path.parent].values.setdefault(name, []).extend(run.values[name])
    return joined


def _same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=SAME) or (math.isnan(first) and math.isnan(second))


def _not_found(runs: Sequence[Recorded], metric: str, where: str) -> str:
    names = sorted({name for run in runs for name in run.names})
    if not names:
        return f"No metric was found in {where}. Write one there as {KINDS}, or name the file: --metric-file."
    near = suggest(metric, names)
    if near.startswith("Known") and len(names) > 12:
        near = f"Known: {', '.join(names[:12])} and {len(names) - 12:,} more."
    return f"Metric '{metric}' was not found in {where}. {near}"


def _state(path: Path) -> tuple[int, int]:
    try:
        seen = path.stat()
    except OSError:
        return (-1, -1)  # it went away
    return (seen.st_size, seen.st_mtime_ns)
