"""The same program in other arithmetic: all of it in a wide format, or every rounding moved by one unit."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.trace.twin_rules import EXACT, LOW

_FLOATS = frozenset({torch.float64, torch.float32, *LOW} - {torch.complex32})
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Products and sums, which add so many numbers that FP32 itself is off by more than its last place.
_PRODUCTS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation"),
        *("convolution", "convolution_backward"),
    )
)
SPREAD = math.sqrt(12)
"""A unit is so many times the spread of one rounding to nearest, whose error is even over one unit."""


class Widened(TorchDispatchMode):
    """Runs a program with every floating-point tensor in one wide format, whatever the program asks for.

    Casts to 16 bits, autocast's too, become casts to the wide format, so that what comes out is what the program means.

    Numerics:
        float16, bfloat16, float8, float32 and float64 arguments are widened, and so are the dtypes that an operation is
        asked for. What is written to in place keeps its format. Bits that are looked at as another type are left alone.
        Checked by tests/agreement/test_arithmetic.py.

    Args:
        dtype: torch.float64 or torch.float32.

    Attributes:
        random: Whether an operation drew random numbers.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._dtype = dtype
        self.random = False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation in the wide format; torch calls this."""
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        call = TracedCall(func, args, kwargs)
        self.random = self.random or _draws(call)
        if call.schema.view or call.schema.silent:
            return call.run()
        written = call.schema.writes
        wide = [self._widen(value, written=name in written) for name, value in call.named[: len(args)]]
        named = {name: self._widen(value, written=name in written) for name, value in kwargs.items()}
        return func(*wide, **named)

    def _widen(self, value: Any, *, written: bool) -> Any:
        if isinstance(value, Tensor):
            narrow = value.dtype in _FLOATS and value.dtype != self._dtype and not written
            return value.to(self._dtype) if narrow else value
        if isinstance(value, torch.dtype):
            return self._dtype if value in _FLOATS else value
        if isinstance(value, list | tuple):
            items = [self._widen(item, written=written) for item in value]  # pyright: ignore[reportUnknownVariableType]
            return items if isinstance(value, list) else tuple(items)
        return value


def _draws(call: TracedCall) -> bool:
    """Whether it draws random numbers; attention says so, and does only with dropout."""
    usual = 0.0 if "dropout_p" in call.schema.names else 1.0
    return call.schema.random and dict(call.named).get("dropout_p", usual) != 0


class Nudged(TorchDispatchMode):
    """Moves every number that an operation rounded to a neighbour: how far a program goes apart by that alone.

    Numerics:
        A number is moved by one unit of its format in its last place, up or down; zeros, inf and NaN stay. What moves
        or picks numbers without rounding them is left alone. A product or sum of K numbers in float32 or float64 is
        moved by sqrt(K) / 4 units, at least 1: the order of additions is free. Checked by
        tests/agreement/test_arithmetic.py.

    Args:
        seed: Of the directions.
        together: Whether all numbers of a tensor go in one direction, as a systematic rounding does.
        units: How many units of a float32 number to move by: 2**16 is one of bfloat16, 2**13 one of float16.

    Attributes:
        formats: Formats of what was rounded.
    """

    def __init__(self, seed: int, *, together: bool = False, units: int = 1) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._seed, self._together, self._units = seed, together, units
        self._generators: dict[torch.device, torch.Generator] = {}
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and move what it gave; torch calls this."""
        call = TracedCall(func, args, kwargs or {})
        result = call.run()
        if any(issubclass(kind, FakeTensor) for kind in types):
            return result
        if call.schema.view or call.schema.silent or call.schema.empty or _draws(call):
            return result
        own = {id(a.tensor) for a in call.tensors}
        for made in tensors_of(result):
            if made is None or made.dtype not in _FLOATS or not made.numel():
                continue
            if id(made) in own and not call.schema.writes:
                continue
            if self._rounds(call, made):
                self.move(made, self._num_units(call, made))
        return result

    @staticmethod
    def _rounds(call: TracedCall, made: Tensor) -> bool:
        if call.schema.base not in EXACT:
            return True
        return any(t.element_size() > made.element_size() for t in call.floats)

    def _num_units(self, call: TracedCall, made: Tensor) -> int:
        if made.dtype in LOW or self._units > 1:
            return self._units if made.dtype not in LOW else 1
        sizes = sorted((t.numel() for t in call.floats), reverse=True)
        length = 1.0
        if call.schema.base in _PRODUCTS and len(sizes) > 1:
            length = math.sqrt(sizes[0] * sizes[1] / made.numel())
        elif sizes:  # what is smaller than what it was made of was added up
            length = max(1.0, sizes[0] / made.numel())
        return max(1, round(math.sqrt(length) / 4))

    def move(self, x: Tensor, units: int = 1) -> None:
        """Move every number of a tensor, in place.

        Args:
            x: The tensor.
            units: By how many units of its format.
        """
        self.formats.add(x.dtype)
        if x.element_size() not in _BITS:
            return
        x = x.detach()
        device = x.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        bits = x.view(_BITS[x.element_size()])
        shape = () if self._together else x.shape
        up = torch.randint(0, 2, shape, generator=self._generators[device], device=device, dtype=bits.dtype)
        # Numbers without a sign are in the order of their bits, and near 0 these are how many units a number has.
        most, mantissa = torch.iinfo(bits.dtype).max, round(-math.log2(torch.finfo(x.dtype).eps))
        size, infinite = bits & most, most >> mantissa << mantissa
        large = infinite - 2 ** (mantissa - 5)  # away from inf: from here on they only move down
        step = torch.where(size >= large, -units, up.mul_(2 * units).sub_(units))
        bits.add_(torch.where((size > units) & (size < infinite), step, 0))
