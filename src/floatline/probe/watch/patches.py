"""Patches: functions and methods replaced for a while, and put back."""
# torch shows these switches to Python under private names only.
# pyright: reportPrivateUsage=false
# torch shows what it traces to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import _symbolic_trace


class Aside:
    """A context for the recorder's own tensors. A class, since it is entered twice an operation."""

    def __enter__(self) -> None:
        self._guards = (torch._C._DisableTorchDispatch(), torch._C._DisableAutocast())
        for guard in self._guards:
            guard.__enter__()
        self._tracked = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._tracked)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


_ABSENT = object()


class Patches:
    """Replaces attributes of modules and classes; `undo` puts every one back, the last first.

    An attribute that a class only inherits is deleted again, so that nothing is left behind.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute by a value."""
        self._made.append((owner, name, _read(owner, name), value))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what `make` makes of it; nothing happens where this torch has none of that name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        self.set(owner, name, replacement)

    def lift(self) -> None:
        """Put everything back for a while; what somebody else has replaced since stays as it is."""
        for owner, name, old, value in reversed(self._made):
            if _read(owner, name) is value:
                _write(owner, name, old)

    def put_on(self) -> None:
        """Replace again what was lifted."""
        for owner, name, old, value in self._made:
            if _read(owner, name) is old:
                setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back for good."""
        while self._made:
            owner, name, old, _ = self._made.pop()
            _write(owner, name, old)


def _read(owner: Any, name: str) -> Any:
    return cast("dict[str, Any]", vars(owner)).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 (its stubs do not know it)
_is_functional: Any = getattr(torch, "_is_functional_tensor")  # noqa: B009
_MODES = tuple(
    getattr(torch._C._TorchDispatchModeKey, name)
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if hasattr(torch._C._TorchDispatchModeKey, name)
)


def is_tracing() -> bool:
    """Whether Dynamo, AOT autograd, torch.export, a functorch transform, FX or torch.jit is at work on this thread."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES):
        return True
    return (
        _functorch.peek_interpreter_stack() is not None
        or TracingContext.try_get() is not None
        or torch.compiler.is_compiling()
        or getattr(_symbolic_trace, "_is_fx_tracing_flag", False)
        or bool(torch._C._is_tracing())
    )


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers that can be looked at: not fake, functional, wrapped by functorch, or meta."""
    return not (
        tensor.is_meta
        or isinstance(tensor, (FakeTensor, FunctionalTensor))
        or _is_functional(tensor)
        or _functorch.is_functorch_wrapped_tensor(tensor)
    )
