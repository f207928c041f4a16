"""MLflow's local stores: a file for each metric below mlruns, and the tables of mlflow.db."""

from __future__ import annotations

import itertools
import math
import sqlite3
import sys
from pathlib import Path

from floatline.errors import ComparisonError
from floatline.validation.metrics.recorded import MOST_NAMES, MOST_VALUES, Recorded

LONGEST_LINE = 4096
LONGEST_SETTING = 10_000
LONGEST_VALUE = 1 << 20
MOST_STEPS, STEPS_BETWEEN = 2_000_000_000, 100_000  # of SQLite's machine; 5,000,000 values need a tenth
ENDLESS = 1.79769313486231e308  # the largest float64 but for the digits that a copy of the database may lose


def metric_folder(path: Path) -> Path | None:
    """The folder `metrics` of the MLflow run that the file belongs to; None where it belongs to none."""
    for folder in path.parents:
        if folder.name == "metrics" and (folder.parent / "meta.yaml").is_file():
            return folder
    return None


def read_metric_file(path: Path) -> Recorded:
    """One metric of a file store: lines of 'timestamp value step'. Its name is its path below `metrics`.

    Raises:
        ComparisonError: The file belongs to no run, or a line is none of MLflow's.
    """
    folder = metric_folder(path)
    if folder is None:
        raise ComparisonError(f"'{path}' lies in no MLflow run. Give a file below a run's 'metrics' folder.")
    recorded = Recorded(path, "MLflow")
    seed = folder.parent / "params" / "seed"
    if seed.is_file():
        with seed.open(encoding="utf-8", errors="replace") as file:
            recorded.settings["seed"] = file.read(LONGEST_SETTING).strip()
    name = path.relative_to(folder).as_posix()
    with path.open(encoding="utf-8", errors="replace") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            words = line.split()
            point = _point(words)
            if point is None:
                raise ComparisonError(
                    f"'{path}' line {number} is not 'timestamp value step'. Fix it, or name another file."
                )
            recorded.add(name, *point)
    return recorded


def _point(words: list[str]) -> tuple[int | None, float] | None:
    """Step and value of a line. Old versions write no step, new ones may add the name and digest of a dataset."""
    try:
        return int(words[2]) if len(words) > 2 else None, float(words[1])
    except (IndexError, ValueError):
        return None


def read_database(path: Path) -> list[Recorded]:
    """Every run of an SQLite store that has metrics and is not deleted, the oldest first.

    Numerics:
        MLflow writes the largest float64 for an infinity, and a flag for NaN; both are turned back.

    Raises:
        ComparisonError: The file is not a database of MLflow.
    """
    runs: dict[str, Recorded] = {}
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            # A table may be a view that never ends, or that makes text without end.
            left = itertools.count(MOST_STEPS // STEPS_BETWEEN, -1)
            connection.set_progress_handler(lambda: next(left) <= 0, STEPS_BETWEEN)
            if sys.version_info >= (3, 11):
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            rows = connection.execute(
                "SELECT run_uuid, start_time FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time LIMIT ?",
                (MOST_NAMES,),
            )
            for run, began in rows:
                runs[run] = Recorded(path, "MLflow", began=None if began is None else began / 1000)
            values = connection.execute(
                "SELECT run_uuid, key, step, value, is_nan FROM metrics "
                "ORDER BY run_uuid, key, step, timestamp LIMIT ?",
                (MOST_VALUES + 1,),
            )
            for run, key, step, value, is_nan in values:
                if run in runs:
                    runs[run].add(str(key), int(step), math.nan if is_nan else _unclipped(float(value)))
            for run, seed in connection.execute("SELECT run_uuid, value FROM params WHERE key = 'seed'"):
                if run in runs:
                    runs[run].settings["seed"] = seed
        finally:
            connection.close()
    except ComparisonError:
        raise  # too many values, which is a ValueError as well
    except (sqlite3.Error, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise ComparisonError(f"'{path}' is not a database of MLflow: {error}. Name another file.") from None
    return [run for run in runs.values() if run.values]


def _unclipped(value: float) -> float:
    return math.copysign(math.inf, value) if abs(value) >= ENDLESS else value
