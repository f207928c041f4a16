"""Functions that a plan names, by module, file or line; only code that is loaded already is looked at."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from floatline.errors import PlanError, suggest
from floatline.numerics.uncompiled import uncompiled
from floatline.precision.user_frames import is_users

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function with its arguments, in another way."""

_KEY = "__floatline__"


class _Layers:
    """What a function did before, and what is put around it: the last comes first."""

    def __init__(self, function: FunctionType) -> None:
        self.original = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__qualname__ = function.__qualname__
        self.arounds: list[Around] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _run(self, args, kwargs)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]


@uncompiled
def _run(layers: _Layers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function: Callable[..., Any] = layers.original
    for around in layers.arounds:
        function = partial(_call_around, around, function)
    return function(*args, **kwargs)


def _call_around(around: Around, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return around(function, args, kwargs)


def _stand_in(*args: Any, __floatline__: _Layers, **kwargs: Any) -> Any:
    return __floatline__(args, kwargs)


def wrap_function(function: FunctionType, around: Around) -> Callable[[], None]:
    """Run a function through `around` from here on, however it is reached; gives what undoes it.

    The function object stays, and gets other code: names imported from its module, methods and closures that hold it
    all call the new one. torch.compile breaks its graph there.

    Args:
        function: A function written in Python.
        around: Called with the function as it was, its arguments and its named arguments.
    """
    layers: _Layers | None = (function.__kwdefaults__ or {}).get(_KEY)
    if layers is None:
        layers = _Layers(function)
        signature = inspect.signature(function)
        # The number of captured variables must stay; they are not read.
        changed = {"co_freevars": function.__code__.co_freevars, "co_name": function.__name__}
        function.__code__ = _stand_in.__code__.replace(**changed)  # pyright: ignore[reportArgumentType]
        function.__defaults__ = None
        function.__kwdefaults__ = {_KEY: layers}
        function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    layers.arounds.append(around)
    return partial(_undo, function, layers, around)


def _undo(function: FunctionType, layers: _Layers, around: Around) -> None:
    if around not in layers.arounds:
        return
    layers.arounds.remove(around)
    if layers.arounds:
        return
    function.__code__ = layers.original.__code__
    function.__defaults__ = layers.original.__defaults__
    function.__kwdefaults__ = layers.original.__kwdefaults__
    del function.__signature__  # pyright: ignore[reportFunctionMemberAccess]


def code_of(function: FunctionType) -> Any:
    """The code that a function was written with, also while it is wrapped."""
    layers: _Layers | None = (function.__kwdefaults__ or {}).get(_KEY)
    return function.__code__ if layers is None else layers.original.__code__


@dataclass(frozen=True)
class FunctionPlace:
    """A function that is loaded, and one line of it where a line was named.

    Args:
        function: The function.
        line: The line, counted from 1; 0 is the whole function.
    """

    function: FunctionType
    line: int = 0


def find_function(name: str, *, said: str, also: Iterable[Any] = ()) -> FunctionPlace:
    """The function that a name means; PlanError with the nearest names where it means none.

    Args:
        name: 'package.module.function', 'package.module.Class.method', 'file.py:function' or 'file.py:31'.
        said: What the plan says of it, to begin the message with.
        also: Functions and classes to look at beside those of modules: local ones, which no module holds.
    """
    place, _, rest = name.rpartition(":")
    extra = list(also)
    if place.endswith(".py"):
        file = _find_file(place, extra, said)
        functions = _functions_of(file, extra)
        return _at_line(int(rest), functions, said) if rest.isdigit() else FunctionPlace(_pick(rest, functions, said))
    dotted = name.replace(":", ".")
    owner = dotted
    while owner and owner not in sys.modules:
        owner = owner.rpartition(".")[0]
    if not owner or owner == dotted:
        raise PlanError(
            f"{said}, but no module that is loaded has it. Name it as file.py:function, or import it first."
        )
    return FunctionPlace(_pick(dotted.removeprefix(f"{owner}."), _functions_in(sys.modules[owner], extra), said))


def _find_file(text: str, also: list[Any], said: str) -> str:
    wanted = Path(text).parts
    files = {str(file) for file in _files(also)}
    found = sorted(file for file in files if Path(file).parts[-len(wanted) :] == wanted)
    own = {code_of(function).co_filename for function in _walk(also, seen=set())}
    if len(found) > 1 and len(own.intersection(found)) == 1:  # the model's or the loss function's own file
        found = sorted(own.intersection(found))
    if not found:
        near = sorted({Path(file).name for file in files if is_users(file) and "site-packages" not in file})
        raise PlanError(f"{said}, but no such file is loaded. {suggest(text, near)}")
    if len(found) > 1:
        raise PlanError(f"{said}, but {len(found)} loaded files are called so. Say which: {', '.join(found[:3])}.")
    return found[0]


def _files(also: list[Any]) -> Iterator[str]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            yield file
    for function in _walk(also, seen=set()):
        yield code_of(function).co_filename


def _functions_of(file: str, also: list[Any]) -> dict[str, FunctionType]:
    owners: list[Any] = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    # A file may have been loaded twice: what the model and the loss function see comes last, and wins.
    near = [f for f in _walk(also, seen=set()) if code_of(f).co_filename == file]
    seen_by = [value for scope in {id(f.__globals__): f.__globals__ for f in near}.values() for value in scope.values()]
    found = [f for f in _walk([*owners, *also], seen=set()) if code_of(f).co_filename == file]
    found += [f for f in _walk([v for v in seen_by if _has_code(v)], seen=set()) if code_of(f).co_filename == file]
    return {_plain_name(function): function for function in found}


def _has_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, type))


def _functions_in(module: ModuleType, also: list[Any]) -> dict[str, FunctionType]:
    found = {_plain_name(f): f for f in _walk([*also, module], seen=set()) if f.__module__ == module.__name__}
    # What a module offers under a name of its own, such as one from a private file.
    offered = {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}
    return offered | found


def _plain_name(function: FunctionType) -> str:
    return function.__qualname__.rpartition("<locals>.")[2]


def _pick(name: str, functions: dict[str, FunctionType], said: str) -> FunctionType:
    if name not in functions:
        raise PlanError(f"{said}, but there is no such function. {suggest(name, list(functions)[:20])}")
    function = functions[name]
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise PlanError(f"{said}, but it is a generator or a coroutine. Name a function that it calls.")
    return function


def _at_line(line: int, functions: dict[str, FunctionType], said: str) -> FunctionPlace:
    found = [f for f in functions.values() if line in _lines_of(code_of(f))]
    if not found:
        lines = sorted({n for f in functions.values() for n in _lines_of(code_of(f))}, key=lambda n: abs(n - line))
        near = (
            f"Nearest lines with code: {', '.join(map(str, sorted(lines[:3])))}." if lines else "It has no functions."
        )
        raise PlanError(f"{said}, but that line is in no function of the file. {near}")
    inner = min(found, key=lambda f: len(_lines_of(code_of(f))))
    if _is_running(code_of(inner)):
        raise PlanError(
            f"{said}, but its function '{_plain_name(inner)}' is running already. Move it to one of its own."
        )
    return FunctionPlace(inner, line)


def _lines_of(code: CodeType) -> set[int]:
    lines = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            lines |= _lines_of(constant)
    return lines


def _is_running(code: CodeType) -> bool:
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _walk(owners: Iterable[Any], *, seen: set[int]) -> Iterator[FunctionType]:
    """The functions of modules and classes, and those that decorators have hidden in others."""
    for owner in owners:
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, (staticmethod, classmethod)):
            yield from _walk([cast("Any", owner).__func__], seen=seen)
        elif isinstance(owner, FunctionType):
            yield owner
            cells = [_contents(cell) for cell in owner.__closure__ or ()]
            yield from _walk([c for c in cells if isinstance(c, FunctionType)], seen=seen)
        elif isinstance(owner, ModuleType):
            own = [v for v in list(vars(owner).values()) if getattr(v, "__module__", None) == owner.__name__]
            yield from _walk(own, seen=seen)
        elif isinstance(owner, type):
            yield from _walk(list(vars(owner).values()), seen=seen)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
