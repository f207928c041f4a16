"""LineIslands: chosen lines of the user's code computed in FP32, or with constants that their format holds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from floatline.precision.user_frames import find_caller

Line = tuple[str, int]
_NARROW = (torch.float16, torch.bfloat16)
_CASTS = frozenset(["half", "bfloat16"])


class LineIslands(TorchFunctionMode):
    """What torch computes on some lines of code is computed in FP32, forward and backward.

    It does what a user would write there: operands of 16 bits are widened, autocast is off, casts to 16 bits and
    tensors made in them are FP32. The results stay FP32 until autocast or a product with 16-bit weights narrows them.
    An operation in place works in the dtype that its tensor has: name the line that makes the tensor, too.

    Numerics:
        The same bits as the line with `.float()` at each operand. Gradients of 16-bit operands are rounded once.
        Checked by tests/probe/runs/test_changes.py.

    Args:
        lines: File and line of each, as a trace names them.
        fitting: Lines whose constants are brought to the nearest number that the format of the first operand holds;
            nothing is widened there.
    """

    def __init__(self, lines: Collection[Line], *, fitting: Collection[Line] = ()) -> None:
        super().__init__()
        self._lines, self._fitting = frozenset(lines), frozenset(fitting)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function; torch calls this."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        spot = find_caller()
        line = (spot.file, spot.line)
        if line in self._fitting:
            return func(*_fit(args, args), **_fit(kwargs, args))
        if line not in self._lines or _writes(name, kwargs):
            return _run_behind(func, args, kwargs)
        if name in _CASTS:
            return args[0].float()
        busy = [device for device in ("cpu", "cuda") if _is_autocast_on(device)]
        with contextlib.ExitStack() as stack:
            for device in busy:
                stack.enter_context(torch.autocast(device, enabled=False))
            wide_args = cast("tuple[Any, ...]", tree_map(_widen, tuple(args)))
            return func(*wide_args, **cast("dict[str, Any]", tree_map(_widen, kwargs)))


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__") or "out" in kwargs


def _run_behind(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A function on another line: where it takes one dtype only, wide results are narrowed to its other operands'."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        narrow = {t.dtype for t in _floats((args, kwargs)) if t.dtype in _NARROW}
        if len(narrow) != 1 or not any(t.dtype is torch.float32 for t in _floats((args, kwargs))):
            raise
        dtype = narrow.pop()

        def shrink(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value

        return func(*tree_map(shrink, tuple(args)), **tree_map(shrink, kwargs))


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _NARROW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value


def _fit(values: Any, operands: Any) -> Any:
    first = next(iter(_floats(operands)), None)
    if first is None:
        return values
    limit = torch.finfo(first.dtype).max

    def fit(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return max(-limit, min(limit, value))
        return value

    return tree_map(fit, values)


def _is_autocast_on(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
