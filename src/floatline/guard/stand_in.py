"""A function of the user's, run in another way wherever it is called from, until that is undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch

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


@torch.compiler.disable
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
