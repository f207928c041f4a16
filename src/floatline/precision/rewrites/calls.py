"""Call: one call of a torch function, by a name that is the same however the user wrote it; and computing in FP32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from floatline.precision.dtypes import NARROW
from floatline.precision.fp32_call import is_autocast_on

_ALIASES = {
    "special_expit": "sigmoid",
    "special_log1p": "log1p",
    "special_softmax": "softmax",
    "special_log_softmax": "log_softmax",
    "negative": "neg",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "__truediv__": "div",
    "__div__": "div",
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "__rsub__": "rsub",
    "__pow__": "pow",
    "multiply": "mul",
    "__iadd__": "add_",
}


def name_set(text: str) -> frozenset[str]:
    """Names with spaces between them, as a set."""
    return frozenset(text.split())


class Missed:
    """The type of MISSED."""


MISSED: Final = Missed()
"""What a rule gives where it does not apply."""


@dataclass(frozen=True)
class Call:
    """One call of a torch function.

    Args:
        name: Its name, aliases resolved.
        function: The function.
        args: Its arguments.
        kwargs: Its named arguments.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def first(self) -> Any:
        """The first argument; None where there is none."""
        return self.args[0] if self.args else self.kwargs.get("input")

    def get(self, index: int, name: str) -> Any:
        """An argument by its place or its name; None where it is not given."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name)

    def run(self) -> Any:
        """Run it as it is."""
        return self.function(*self.args, **self.kwargs)

    def run_with(self, change: Callable[[Any], Any]) -> Any:
        """Run it with every argument changed."""
        args = cast("tuple[Any, ...]", tree_map(change, self.args))
        return self.function(*args, **cast("dict[str, Any]", tree_map(change, self.kwargs)))


def name_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of a function, with the name that rules know it by."""
    name = str(getattr(function, "__name__", ""))
    return Call(_ALIASES.get(name, name), function, args, kwargs)


def widen(value: Any) -> Any:
    """A 16-bit tensor as FP32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value


@contextlib.contextmanager
def without_autocast(*tensors: Tensor) -> Generator[None]:
    """Compute in the dtypes that the tensors have."""
    with contextlib.ExitStack() as stack:
        for device in {tensor.device.type for tensor in tensors}:
            if is_autocast_on(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def result_dtype(call: Call) -> torch.dtype:
    """The dtype that a call gives, found on tensors of one element."""

    def shrink(value: Any) -> Any:
        return value.detach().new_ones((1,) * value.dim()) if isinstance(value, Tensor) else value

    with torch.no_grad():
        return call.run_with(shrink).dtype


def tensors_in(*trees: Any) -> list[Tensor]:
    """Every tensor in containers within containers, such as the arguments of a call."""
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]
