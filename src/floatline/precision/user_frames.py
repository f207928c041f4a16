"""Where in the user's code something happened: the innermost frame that is not torch's, floatline's or Python's."""

from __future__ import annotations

import itertools
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TextIO, TypeVar

import torch

_PACKAGES = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parents[1]) + "/")
# The reference systems stand in for a user's code.
_SYSTEMS = str(Path(__file__).parents[1] / "systems") + "/"
_STANDARD = tuple(sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib"))


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of code.

    Args:
        file: Its file; '' where no frame of the user's was on the stack.
        line: Counted from 1.
        function: Name of the function, with its class where Python tells.
    """

    file: str = ""
    line: int = 0
    function: str = ""


NOWHERE = Spot()
# By the identity of code objects, which are kept: comparing them takes longer than all else here.
_ENDS: dict[int, CodeType] = {}
_SPOTS: dict[tuple[int, int], tuple[CodeType, Spot]] = {}
_PASSED: dict[int, CodeType] = {}  # torch's, floatline's and Python's
_MOST = 1 << 16  # of each, for code that is made again and again
_GRAPH = "<eval_with_key"  # a file of code that torch.fx has made
_TRACED = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# A shorter text is in a message by chance.
_FEWEST_LETTERS = 10


@cache
def is_users(file: str) -> bool:
    """Whether a source file is neither torch's, floatline's nor the standard library's."""
    if file.startswith(_SYSTEMS):
        return True
    if file.startswith(("<frozen", "<eval_with_key", "<__array_function__", *_PACKAGES)):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file


def find_caller() -> Spot:
    """The user's innermost frame on the stack of this call; of a graph that was exported, the line it was made of.

    What lies behind what `end_search_at` was told of is not the user's model, but who asked for it to be run.
    """
    return find_outer(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]


def find_outer(frame: FrameType | None) -> Spot:
    """The user's line that a frame, or the innermost one of those that called it, is at."""
    while frame is not None:
        code = frame.f_code
        if id(code) not in _PASSED:
            if ends_search(frame):
                return NOWHERE
            spot = find_spot(frame)
            if spot.file:
                return spot
            if not code.co_filename.startswith(_GRAPH):
                _keep(_PASSED, id(code), code)
        frame = frame.f_back
    return NOWHERE


def find_spot(frame: FrameType) -> Spot:
    """The user's line that a frame is at; NOWHERE where it is not the user's."""
    code = frame.f_code
    file = code.co_filename
    if not is_users(file):
        return _find_in_graph(frame) if file.startswith(_GRAPH) else NOWHERE
    key = (id(code), frame.f_lineno)
    known = _SPOTS.get(key)
    if known is None:
        known = _keep(_SPOTS, key, (code, Spot(file, frame.f_lineno, _name(code))))
    return known[1]


def _keep(table: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    if len(table) >= _MOST:
        table.clear()
    table[key] = value
    return value


def ends_search(frame: FrameType) -> bool:
    """Whether a frame is one that `end_search_at` was told of."""
    return id(frame.f_code) in _ENDS


def end_search_at(function: Any) -> None:
    """Say that a function runs the user's model: its callers are not looked at."""
    if isinstance(function, FunctionType):
        _ENDS[id(function.__code__)] = function.__code__
        _PASSED.pop(id(function.__code__), None)


def _find_in_graph(frame: FrameType) -> Spot:
    """The user's line that the node of a graph, which this frame of its code is at, was recorded from."""
    graph: Any = frame.f_locals.get("self")
    lines: Mapping[int, int | None] = getattr(graph, "_lineno_map", None) or {}
    number = lines.get(frame.f_lineno - frame.f_code.co_firstlineno)
    if number is None:
        return NOWHERE
    nodes: Iterable[Any] = graph.graph.nodes
    node: Any = next(itertools.islice(nodes, number, None), None)
    found: list[tuple[str, str, str]] = _TRACED.findall(getattr(node, "stack_trace", None) or "")
    own = [Spot(file, int(line), name) for file, line, name in found if is_users(file)]
    return own[-1] if own else NOWHERE


def point_warnings_at_users() -> None:
    """Let a warning that torch places in floatline, which stands between it and the user's code, name the user's."""
    shown = warnings.showwarning
    if getattr(shown, "__module__", "") == __name__:
        return

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        spot = find_caller() if filename.startswith(_PACKAGES[1]) else NOWHERE
        if spot.file:
            filename, lineno, line = spot.file, spot.line, None
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def find_wording(trace: TracebackType | None, message: str) -> Spot:
    """The user's innermost frame that words a message which a helper below it raises; NOWHERE where none does."""
    found, last = NOWHERE, None
    while trace is not None:
        last = trace.tb_frame.f_code
        words = [text for text in last.co_consts if isinstance(text, str) and len(text) >= _FEWEST_LETTERS]
        if is_users(last.co_filename) and any(text in message for text in words):
            found = Spot(last.co_filename, trace.tb_lineno, _name(last))
        trace = trace.tb_next
    # What torch or Python raises is worded there: a text of the user's that is in it is a name, or chance.
    return found if last is not None and is_users(last.co_filename) else NOWHERE


def find_raiser(trace: TracebackType | None) -> Spot:
    """The user's innermost frame in a traceback."""
    found = NOWHERE
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            found = Spot(code.co_filename, trace.tb_lineno, _name(code))
        trace = trace.tb_next
    return found


def _name(code: CodeType) -> str:
    # co_qualname came with Python 3.11; 'f.<locals>.g' is just g to a reader.
    return str(getattr(code, "co_qualname", code.co_name)).rpartition("<locals>.")[2]


@cache
def is_installed(file: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def find_script_line() -> Spot:
    """The innermost frame that is neither Python's, torch's nor an installed package's; else as `find_caller`."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file) and not is_installed(file):
            return Spot(file, frame.f_lineno, _in_script(frame.f_code))
        frame = frame.f_back
    return find_caller()


def find_raising_line(trace: TracebackType | None) -> Spot:
    """The innermost frame of a traceback that is neither Python's, torch's nor a package's; else as `find_raiser`."""
    lines: list[Spot] = []
    step = trace
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_users(file) and not is_installed(file):
            lines.append(Spot(file, step.tb_lineno, _in_script(step.tb_frame.f_code)))
        step = step.tb_next
    return lines[-1] if lines else find_raiser(trace)


def _in_script(code: CodeType) -> str:
    name = _name(code)
    return "" if name == "<module>" else name
