"""The numbers of one tensor and of its FP32 twin: at once on the CPU; elsewhere later, and read at the end."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.trace.trace import Op, Values
from floatline.probe.trace.triton_start import await_triton
from floatline.probe.trace.twin_rules import LOW, widened

if TYPE_CHECKING:
    from floatline.probe.trace.measure_launch import Rows

_FIGURES = tuple(f.name for f in fields(Values) if f.name != "shape")
_NUM_OWN = 4  # counts that do not need a twin
# Who loads Triton, which takes half a second, and seconds the first time on a machine. The bytes of tensors from which
# on that is worth it: of all, and of one, since without Triton measuring takes five copies of it; and the number of
# tensors, each of which takes `reduce_on_device` most of a millisecond of the host, and the kernel a twentieth of it.
_KERNEL, _WORTH_TRITON, _LARGE, _MANY = "floatline.probe.trace.measure_launch", 2**34, 2**26, 256
# A model with so many large weights on a GPU has more tensors than that in every step.
_LARGE_WEIGHTS = 32
# Until then, tensors of up to so many elements are kept, so many elements in all, and measured on the host at the end:
# on a GPU, each of the twenty operations of `reduce_on_device` takes milliseconds when it runs for the first time.
_SMALL, _MOST_KEPT = 2**14, 2**22
_KEPT = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
# Sums that may stand still.
_SUMS = frozenset(
    (
        *(f"{prefix}{name}" for name in ("add", "sub", "addcmul", "addcdiv", "lerp") for prefix in ("", "_foreach_")),
        *("mul", "_foreach_mul"),  # in place, by a number: decay
        *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),  # whole updates of weights
    )
)


class Measures:
    """Measures tensors without waiting for a device; `read` fills in what is still there.

    Numerics:
        Counts are exact; those of a complex tensor count its real and imaginary parts.
        Magnitudes are exact but for integers above 2**53.
        Norms are sums in float64 of differences between float32 (or float64) numbers.
        Checked by tests/probe/trace/test_measures.py.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Values, bool, Tensor, Tensor]] = []
        self._kept: list[tuple[Values, bool, Tensor, Tensor | None]] = []
        self._num_kept = self._bytes = 0
        self._expects_many = False
        self._rows: dict[torch.device, Rows | None] = {}
        self._in_rows: dict[torch.device, list[tuple[Values, bool]]] = {}
        self._copies: list[tuple[Values, Values]] = []
        self._sums: list[tuple[Op, Tensor]] = []

    def expect(self, weights: Iterable[Tensor]) -> None:
        """Tell what a model holds whose step is measured: of a large one all tensors are worth Triton."""
        large = sum(weight.device.type != "cpu" and weight.numel() > _SMALL for weight in weights)
        self._expects_many = self._expects_many or large >= _LARGE_WEIGHTS

    def measure(self, x: Tensor, twin: Tensor | None, *, exact: bool) -> Values:
        """Figures of a tensor; complete after `read`.

        Args:
            x: The tensor; it may be written to afterwards.
            twin: Its FP32 twin; None where it has none of its own.
            exact: Whether it is its own twin.
        """
        values = Values(_name_dtype(x.dtype), tuple(x.shape), x.numel())
        if exact:
            values.twin_largest, values.twin_nonfinite, values.lost, values.blown, values.error = 0.0, 0, 0, 0, 0.0
        if x.is_sparse:
            x = x._values()  # pyright: ignore[reportPrivateUsage]
        if not x.numel() or x.layout is not torch.strided or x.is_meta or x.is_quantized:
            return values
        if x.is_complex():
            x = _parts(x)
            twin = None if twin is None else _parts(twin)
        if x.device.type == "cpu":
            _fill(values, *_reduce_on_cpu(_to_numpy(x), None if twin is None else _to_numpy(twin)), exact=exact)
        else:
            self._measure_later(values, x, twin, exact=exact)
        return values

    def _measure_later(self, values: Values, x: Tensor, twin: Tensor | None, *, exact: bool) -> None:
        """Leave the figures on the device, or what a small tensor holds."""
        rows = self._find_rows(x)
        if rows is not None and rows.takes(x, twin):
            rows.measure(x, twin)
            self._in_rows.setdefault(x.device, []).append((values, exact))
        elif rows is None and x.numel() <= min(_SMALL, _MOST_KEPT - self._num_kept) and x.dtype in _KEPT:
            self._num_kept += x.numel()
            self._kept.append((values, exact, _copy(x), None if twin is None else _copy(twin)))
        else:
            self._pending.append((values, exact, *reduce_on_device(x, twin)))

    def _find_rows(self, x: Tensor) -> Rows | None:
        """The kernel's table; None while it is not worth it, and for a device that Triton does not know."""
        size = x.numel() * x.element_size()
        self._bytes += size
        many = self._expects_many or len(self._pending) >= _MANY
        worth = many or self._bytes > _WORTH_TRITON or size > _LARGE or _KERNEL in sys.modules
        if worth and x.device not in self._rows:
            self._rows[x.device] = _make_rows(x.device)
        return self._rows.get(x.device)

    def reshape(self, values: Values, shape: tuple[int, ...]) -> Values:
        """The figures of the same elements in another shape."""
        if not self._pending and not self._in_rows and not self._kept:
            return replace(values, shape=shape)
        copy = replace(values, shape=shape)
        self._copies.append((copy, values))
        return copy

    def count_stuck(self, op: Op, candidates: list[list[RunningSum | None]], results: list[Tensor]) -> None:
        """Count what stood still in a sum; to be read after `read`."""
        if candidates:
            rows = self._rows.get(results[0].device) if results else None
            self._sums.extend((op, count) for count in count_stuck(candidates, results, rows))

    def read(self) -> None:
        """Fill in the figures of all tensors measured so far; waits for the device."""
        kept, self._kept, self._num_kept = self._kept, [], 0
        homes = zip(_bring_home([k[2] for k in kept]), _bring_home([k[3] for k in kept]), strict=True)
        for (values, exact, *_), (x, twin) in zip(kept, homes, strict=True):
            _fill(values, *_reduce_on_cpu(_to_numpy(x), None if twin is None else _to_numpy(twin)), exact=exact)
        pending, self._pending = self._pending, []
        rows = zip(fetch([p[2] for p in pending]), fetch([p[3] for p in pending]), strict=True)
        for (values, exact, *_), (counts, sizes) in zip(pending, rows, strict=True):
            _fill(values, counts, sizes, exact=exact)
        for device, measured in self._in_rows.items():
            read = cast("Rows", self._rows[device]).read()
            for (values, exact), (counts, sizes) in zip(measured, read, strict=True):
                _fill(values, counts, sizes, exact=exact)
        self._in_rows = {}
        for copy, source in self._copies:
            for name in _FIGURES:
                setattr(copy, name, getattr(source, name))
        for (op, _), (moved, stuck) in zip(self._sums, fetch([s[1] for s in self._sums]), strict=True):
            if op.stuck is None or stuck > op.stuck:  # of several operands, the one that stood still the most
                op.moved, op.stuck = moved, stuck
        self._copies, self._sums = [], []


@cache
def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _bring_home(parts: list[Tensor | None]) -> list[Any]:
    """Vectors on the host, with one copy a device and format."""
    result: list[Any] = [None] * len(parts)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, part in enumerate(parts):
        if part is not None:
            alike.setdefault((part.device, part.dtype), []).append(i)
    for places in alike.values():
        own = [cast("Tensor", parts[i]) for i in places]
        whole, start = torch.cat(own).cpu(), 0
        for i, part in zip(places, own, strict=True):
            result[i] = whole[start : start + part.numel()]
            start += part.numel()
    return result


def _make_rows(device: torch.device) -> Rows | None:
    """The kernel's table; None for a device that Triton does not know."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from floatline.probe.trace.measure_launch import Rows

    await_triton()
    return Rows()


def reduce_on_device(x: Tensor, twin: Tensor | None) -> tuple[Tensor, Tensor]:
    """Counts and magnitudes as two small tensors, in the order that `_fill` reads."""
    if x.dtype in (torch.int64, torch.int32):
        x = x.double()
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    size = x.abs()
    finite = size < math.inf
    counts = [(x == 0).sum(), (x == math.inf).sum(), (x == -math.inf).sum(), (x != x).sum()]
    sizes = [torch.where(finite, size, 0.0).amax(), torch.where(size > 0, size, math.inf).amin()]
    if twin is None:
        return torch.stack(counts), torch.stack(sizes)
    twin_size = twin.abs()
    twin_finite = twin_size < math.inf
    both = finite & twin_finite
    counts += [(~twin_finite).sum(), ((x == 0) & (twin_size > 0)).sum(), (twin_finite & ~finite).sum()]
    sizes += [
        torch.where(twin_finite, twin_size, 0.0).amax(),
        torch.linalg.vector_norm(torch.where(both, x - twin, 0.0), dtype=torch.float64),
        torch.linalg.vector_norm(torch.where(both, twin, 0.0), dtype=torch.float64),
    ]
    return torch.stack(counts), torch.stack([s.double() for s in sizes])


def _reduce_on_cpu(x: Any, twin: Any | None) -> tuple[list[int], list[float]]:
    """The same in NumPy, which takes a tenth of torch's time for small tensors."""
    size = np.abs(x)
    largest = size.max()
    clean = bool(largest < math.inf)
    zeros = x.size - int(np.count_nonzero(x))
    counts = [zeros, 0, 0, 0]
    finite = None
    if not clean:
        finite = size < math.inf
        counts[1:] = [int((x == math.inf).sum()), int((x == -math.inf).sum()), int((x != x).sum())]
        largest = np.max(size, where=finite, initial=0.0)
    smallest = size.min() if clean and not zeros else np.min(size, where=size > 0, initial=math.inf)
    sizes = [float(largest), float(smallest)]
    if twin is None:
        return counts, sizes
    twin_size = np.abs(twin)
    twin_largest = twin_size.max()
    lost = int(np.count_nonzero(twin_size[x == 0] > 0)) if zeros else 0
    if clean and twin_largest < math.inf:
        return [*counts, 0, lost, 0], [*sizes, float(twin_largest), _norm(x, twin), _norm(twin)]
    twin_finite = twin_size < math.inf
    both = twin_finite if finite is None else finite & twin_finite
    counts += [int((~twin_finite).sum()), lost, int(twin_finite.sum() - both.sum())]
    twin_largest = float(np.max(twin_size, where=twin_finite, initial=0.0))
    return counts, [*sizes, twin_largest, _norm(x[both], twin[both]), _norm(twin[both])]


def _norm(x: Any, minus: Any | None = None) -> float:
    wide = x.astype(np.float64) if minus is None else np.subtract(x, minus, dtype=np.float64)
    flat = wide.ravel()
    # Not dot(): above 10,000 numbers it waits for threads of its own, milliseconds each time on a busy machine.
    return math.sqrt(float(np.einsum("i,i->", flat, flat)))


def _to_numpy(x: Tensor) -> Any:
    if x.dtype is torch.float64 or not x.is_floating_point():
        return x.detach().numpy().astype(np.float64, copy=False)
    return x.detach().float().numpy()


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj().resolve_neg())


def fetch(rows: list[Tensor]) -> list[list[Any]]:
    """Read small vectors of several lengths with one copy a device."""
    result: list[list[Any]] = [[] for _ in rows]
    by_device: dict[torch.device, list[int]] = {}
    for i, row in enumerate(rows):
        by_device.setdefault(row.device, []).append(i)
    for indices in by_device.values():
        flat = cast("list[Any]", torch.cat([rows[i] for i in indices]).tolist())
        start = 0
        for i in indices:
            result[i] = flat[start : start + rows[i].shape[0]]
            start += rows[i].shape[0]
    return result


def _fill(values: Values, counts: list[int], sizes: list[float], *, exact: bool) -> None:
    values.zeros, values.pos_inf, values.neg_inf, values.nan = counts[:_NUM_OWN]
    values.largest, values.smallest = sizes[:2]
    if exact:
        values.twin_largest, values.twin_nonfinite = values.largest, values.nonfinite
    if len(counts) == _NUM_OWN:
        return
    values.twin_nonfinite, values.lost, values.blown = counts[_NUM_OWN:]
    values.twin_largest, difference, norm = sizes[2:]
    values.error = difference / norm if norm else (math.inf if difference else 0.0)


@dataclass(slots=True)
class RunningSum:
    """One 16-bit operand of a sum, as it was, and the sum in float32."""

    before: Tensor
    exact: Tensor


def find_sums(call: TracedCall) -> list[list[RunningSum | None]]:
    """The operands that a sum may leave as they are, before it runs; foreach sums have several a list.

    Numerics:
        The sum is computed from the operands as they are, not from their twins: an operand that has become 0
        moves nothing. Checked by tests/probe/trace/test_twins.py.
    """
    first = [a.tensor for a in call.tensors if a.name == call.tensors[0].name] if call.tensors else []
    if call.schema.base not in _SUMS or call.schema.outs or any(t.dtype not in LOW for t in first):
        return []
    if any(a.tensor.layout is not torch.strided for a in call.tensors):
        return []
    if call.schema.base.endswith("mul") and not (call.schema.writes and len(first) == len(call.tensors)):
        return []
    candidates = [first]
    if call.schema.base == "add" and not call.schema.writes and len(call.tensors) == 2:
        candidates.append([call.tensors[1].tensor])  # b + a is as good as a + b
    args, kwargs = widened(call, lambda _, t: t.to(torch.float32, copy=True) if t.is_floating_point() else t)
    try:
        result = call.func(*args, **kwargs)
    except Exception:
        return []  # the operation itself will say what is wrong
    exact = tensors_of(args[0] if call.schema.writes else result)
    return [
        [
            RunningSum(t.clone() if call.schema.writes else t, total)
            if total is not None and t.shape == total.shape and t.dtype in LOW
            else None
            for t, total in zip(tensors, exact, strict=True)
        ]
        for tensors in candidates
    ]


def count_stuck(
    candidates: list[list[RunningSum | None]], results: list[Tensor], rows: Rows | None = None
) -> list[Tensor]:
    """Elements that the exact sum changes, and those of them that came out unchanged: once for each row of operands.

    A sum of what is not finite is not finite, so operands need not be asked. A kernel that measures counts faster.
    """
    finite: dict[int, Tensor] = {}
    counts: list[Tensor] = []
    for sums in candidates:
        own: list[Tensor] = []
        for one, result in zip(sums, results, strict=False):
            if one is None or one.before.shape != result.shape:
                continue
            counted = None if rows is None else rows.count_stuck(one.before, one.exact, result)
            if counted is not None:
                own.append(counted)
                continue
            known = finite.get(id(one.exact))
            known = finite[id(one.exact)] = one.exact.abs() < math.inf if known is None else known
            moved = (one.exact != one.before) & known
            own.append(torch.stack([moved, moved & (one.before == result)]).reshape(2, moved.numel()).sum(1))
        if own:
            counts.append(own[0] if len(own) == 1 else torch.stack(own).sum(0))
    return counts
