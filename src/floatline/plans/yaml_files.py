"""Plans on the disk: YAML, written whole or not at all, and read without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from floatline.base.files import read_bounded, write_whole
from floatline.errors import PlanError

_MOST_BYTES = 4 << 20
_MOST_VALUES = 100_000  # with every alias spelled out


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
        data = parse_yaml(read_bounded(path, most=_MOST_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PlanError(f"{said} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{said} is not plain YAML: {_first_problem(error)}. Fix it there.") from None
    except OSError as error:
        raise PlanError(f"{said} cannot be read: {error.strerror}. Check the file.") from None
    if data is None:
        needs = "at least weights and compute" if what == "Plan" else "at least one setting"
        raise PlanError(f"{said} is empty. It needs {needs}.")
    if not isinstance(data, Mapping):
        raise PlanError(f"{said} holds a {type(data).__name__}. It must map keys to values.")
    return {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def parse_yaml(text: str, *, most: int = _MOST_VALUES) -> object:
    """The plain values of a YAML text: nothing is run, and aliases of aliases are not followed without end.

    Args:
        text: The text, which may be anyone's.
        most: How many values it may have, with every alias and merged key spelled out.

    Raises:
        yaml.YAMLError: It is not plain YAML.
    """
    loader = yaml.SafeLoader(text)
    try:
        node: Any = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > most:
            raise yaml.YAMLError(f"it has more than {most:,} values")
        return loader.construct_document(node)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise yaml.YAMLError("a value is not what its tag or form says") from None  # as !!bool x, or 2020-99-99
    finally:
        loader.dispose()


def _count(node: Any, known: dict[int, int]) -> int:
    """Values below a node, those behind aliases once for each alias; YAMLError where it is its own part."""
    if id(node) in known:
        if known[id(node)] < 0:
            raise yaml.YAMLError("an alias refers to what it is in")
        return known[id(node)]
    known[id(node)] = -1
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_count(item, known) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_count(key, known) + _count(item, known) for key, item in node.value)
    known[id(node)] = total
    return total


def _first_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())[:200]
