"""Plans on the disk: YAML, written whole or not at all, and read without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from floatline.errors import PlanError
from floatline.whole_files import write_whole


def write_yaml(path: Path, data: dict[str, Any]) -> None:
    """Write a mapping: whole or not at all, also when the machine stops half way."""
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    try:
        write_whole(path, text)
    except OSError as error:
        raise PlanError(f"Plan cannot be written to '{path}': {error.strerror}. Choose another path.") from None


def read_yaml(path: Path, *, what: str = "Plan") -> dict[str, Any]:
    """The mapping that a YAML file holds; PlanError where it holds none.

    Args:
        path: The file.
        what: What the file is, for the error.
    """
    said = f"{what} '{path}'"
    if path.is_dir():
        raise PlanError(f"{said} is a folder. Give a YAML file.")
    if not path.is_file():
        raise PlanError(f"{said} does not exist. Give a YAML file{' or the name of a plan' * (what == 'Plan')}.")
    try:
        data: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PlanError(f"{said} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PlanError(f"{said} is not plain YAML: {_first_problem(error)}. Mend it there.") from None
    except OSError as error:
        raise PlanError(f"{said} cannot be read: {error.strerror}. Check its permissions.") from None
    if data is None:
        needs = "at least weights and compute" if what == "Plan" else "at least one setting"
        raise PlanError(f"{said} is empty. It needs {needs}.")
    if not isinstance(data, Mapping):
        raise PlanError(f"{said} holds a {type(data).__name__}. It must map keys to values.")
    return {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _first_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)
