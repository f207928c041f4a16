"""Kernel checks: whether operations give, to within their bounds, what FP32 gives of the same 16-bit inputs."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from floatline.precision.random_state import RandomState
from floatline.probe.trace.kernel_bounds import (
    SameInputs,
    bound_attention,
    bound_foreign,
    find_bound,
    results_of,
    run_aside,
)
from floatline.probe.trace.schemas import TracedCall
from floatline.probe.trace.twin_rules import Wide, dtype_of_twin, full_float32, widened
from floatline.probe.watch.patches import Aside

_JUDGED = (torch.float16, torch.bfloat16)
# Devices on which torch's own kernels were measured to be within their bounds, and the least torch of which they were:
# by tests/probe/trace/test_kernel_bounds.py, and on a GPU by tools/kernel_bounds.py. Elsewhere nothing is judged: a
# kernel that adds up in 16 bits there, as documented, would be called wrong.
MEASURED: dict[str, tuple[int, int]] = {"cpu x86_64": (2, 13)}
# A wrong kernel is wrong by more than what its bound nearly allows.
_CLEARLY = 2.0
# Slack for the roundings of the bound itself.
_SLACK = 1.0 + 2.0**-9
# They speak with other processes, or change what other operations read.
_NOT_ASKED = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "profiler",
    "inductor",
    "higher_order",
)
# Their partial sums may be of 16 bits, and overflow where the whole does not.
_OVERFLOWING = frozenset(
    (
        "mean",
        "sum",
        "index_add",
        "index_put",
        "scatter_add",
        "embedding_dense_backward",
        "cumsum",
        "convolution",
    )
)
# Of up to so many kernels, and so many bytes each, the inputs are kept.
_MOST_KEPT, _MOST_BYTES = 4, 64 << 20


def name_kind(device: torch.device) -> str:
    """The kind of a device by which it stands in `MEASURED`: 'cpu x86_64', 'cuda 9.0', 'hip gfx942'."""
    if device.type == "cpu":
        machine = platform.machine().lower()
        return f"cpu {'x86_64' if machine == 'amd64' else machine}"
    if device.type != "cuda":
        return device.type
    facts = cast("Any", torch.cuda.get_device_properties(device))
    if torch.version.hip:
        return f"hip {facts.gcnArchName.split(':')[0]}"
    return f"cuda {facts.major}.{facts.minor}"


@cache
def is_measured(device: torch.device) -> bool:
    """Whether kernels are judged on a device, with the torch that is running."""
    least = MEASURED.get(name_kind(device))
    return least is not None and tuple(int(part) for part in torch.__version__.split(".")[:2]) >= least


@dataclass(frozen=True, slots=True)
class Offence:
    """One result that is farther from FP32's than its bound, at its worst element; `as_json` is for the trace.

    Args:
        op: Index of the operation.
        output: Which of its results.
        place: Of the element.
        value: What it is.
        expected: What FP32 gives.
        error: How far apart they are; inf of what is not finite.
        largest: The largest number that FP32 gives.
        allowed: How far they may be.
        share: Of the elements that are beyond their bounds.
    """

    op: int
    output: int
    place: tuple[int, ...]
    value: float
    expected: float
    error: float
    largest: float
    allowed: float
    share: float

    def as_json(self) -> dict[str, Any]:
        """As a record of plain numbers."""
        return {name: getattr(self, name) for name in self.__slots__} | {"place": list(self.place)}


class KernelChecks:
    """Holds the operations of a step to FP32 on the same inputs: one of each operation, shapes, formats and numbers.

    Numerics:
        See `kernel_bounds`. Judged are the devices of `MEASURED`, where the bounds were measured. An operation
        without a bound is not judged, nor one that draws random numbers, nor a foreign one that does not run in FP32 or
        that gives other numbers when it runs again, or any foreign one while several processes train together.
        Checked by tests/probe/trace/test_kernel_bounds.py and test_wrong_kernels.py.

    Attributes:
        found: What is beyond its bound.
        arguments: By index of the operation, its full name and what it was called with, copied: positional, by name.
        failures: How often an operation could not be judged, by its name.
        nearest: By the name of an operation, the largest error over what is allowed; beyond 1 it is found.
    """

    def __init__(self) -> None:
        self.found: list[Offence] = []
        self.arguments: dict[int, tuple[str, list[Any], dict[str, Any]]] = {}
        self.failures: Counter[str] = Counter()
        self.nearest: dict[str, float] = {}
        self._seen: set[Hashable] = set()

    def begin(self, call: TracedCall) -> SameInputs | None:
        """Read what an operation may write over; None where it is not to be judged. Changes nothing of the step."""
        if not call.schema.writes:
            return None
        written = [t for t in call.written or _outs(call) if t.dtype in _JUDGED]
        if not written or not self._is_new(call, written):
            return None
        with Aside():
            return self._try(call, written)

    def finish(self, same: SameInputs | None, call: TracedCall, index: int, outputs: Sequence[Tensor | None]) -> None:
        """Judge what an operation gave."""
        if same is None:
            judged = not call.schema.writes and any(t is not None and t.dtype in _JUDGED for t in outputs)
            if not judged or not self._is_new(call, outputs):
                return
            same = self._try(call, outputs)
        if same is None:
            return
        try:
            self._judge(same, index, outputs)
        except Exception:
            self.failures[call.schema.name] += 1

    def _is_new(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> bool:
        if not all(is_measured(t.device) for t in outputs if t is not None):
            return False
        bound = find_bound(call)
        if bound is None or (call.schema.random and bound is not bound_attention):
            return False
        if any(a.tensor.layout is not torch.strided or a.tensor.is_meta for a in call.tensors):
            return False
        if call.schema.name.startswith(_NOT_ASKED) or (bound is bound_foreign and _has_others()):
            return False
        tensors = tuple((a.tensor.shape, a.tensor.dtype, a.tensor.stride()) for a in call.tensors)
        key = (call.schema.name, tensors, call.numbers())
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def _try(self, call: TracedCall, outputs: Sequence[Tensor | None]) -> SameInputs | None:
        try:
            return _calculate(call, outputs)
        except Exception:
            self.failures[call.schema.name] += 1
            return None

    def _judge(self, same: SameInputs, index: int, outputs: Sequence[Tensor | None]) -> None:
        bound = find_bound(same.call)
        if bound is None:
            return
        own = list(outputs) if any(t is not None for t in outputs) else same.call.written or _outs(same.call)
        if all(_is_rounded_once(t, result) for t, result in zip(own, same.results, strict=False)):
            return  # as most are: no bound needs to be computed
        with _undisturbed(same.call), full_float32():
            errors = bound(same)
        worst: Offence | None = None
        for i, (output, result, error) in enumerate(zip(own, same.results, errors, strict=False)):
            if output is None or result is None or error is None or output.dtype not in _JUDGED:
                continue
            if output.shape != result.shape or not output.numel():
                continue
            allowed = _allow(output, result, error)
            excess = _measure_excess(output, result, allowed, judges_inf=lambda: _judges_inf(same))
            name, largest = same.call.schema.name, float(excess.max())
            self.nearest[name] = max(largest, self.nearest.get(name, 0.0))
            offence = _describe(index, i, output, result, allowed, excess) if largest > 1.0 else None
            worst = offence if offence is not None and (worst is None or offence.share > worst.share) else worst
        if worst is None or not _gives_the_same_again(same, own):
            return
        self.found.append(worst)
        if len(self.arguments) < _MOST_KEPT and sum(a.tensor.nbytes for a in same.call.tensors) <= _MOST_BYTES:
            self.arguments[index] = (str(same.call.func), *_copy_arguments(same))


def _judges_inf(same: SameInputs) -> bool:
    """Whether no sum of the operation can be too large where its result is not, nor inf come of an input."""
    if same.call.schema.base in _OVERFLOWING:
        return False
    return all(bool(tensor.isfinite().all()) for tensor in same.call.floats)


def _has_others() -> bool:
    """Whether other processes train along: a foreign kernel may wait for them, and they do not call it again."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1


def _outs(call: TracedCall) -> list[Tensor]:
    return [a.tensor for a in call.tensors if a.name in call.schema.writes]


def _undisturbed(call: TracedCall) -> Any:
    """Random numbers that a foreign kernel draws are put back."""
    return nullcontext() if call.schema.name.startswith("aten.") else RandomState.now().replayed()


def _calculate(call: TracedCall, outputs: Sequence[Tensor | None]) -> SameInputs:
    formats = {t.dtype for t in outputs if t is not None and t.dtype in _JUDGED}

    def widen(name: str, tensor: Tensor) -> Tensor:
        wide = tensor.to(dtype_of_twin(tensor.dtype))
        return wide.clone() if wide is tensor and name in call.schema.writes else wide

    args, kwargs = widened(call, widen)
    wide = Wide(call.func, args, kwargs, outputs)
    with _undisturbed(call), full_float32():
        results = results_of(call, wide)
    return SameInputs(call, wide, results, max(torch.finfo(form).eps for form in formats) / 2)


def _is_rounded_once(output: Tensor | None, result: Tensor | None) -> bool:
    """Whether a result is FP32's but for one rounding."""
    if output is None or result is None or output.dtype not in _JUDGED or output.shape != result.shape:
        return True
    apart = torch.sub(output, result).abs_()
    return bool(torch.le(apart, result.abs().mul_(torch.finfo(output.dtype).eps / 2)).all())


def _allow(output: Tensor, result: Tensor, error: Tensor | float) -> Tensor:
    """How far each element may be from FP32's: the error inside of the operation, and the rounding of its result."""
    facts = torch.finfo(output.dtype)
    tiny = max(2 * facts.smallest_normal * facts.eps, torch.finfo(torch.float32).smallest_normal)
    error = _CLEARLY * error
    return ((facts.eps / 2) * _SLACK) * (result.abs() + error) + error + tiny


def _measure_excess(output: Tensor, result: Tensor, allowed: Tensor, *, judges_inf: Callable[[], bool]) -> Tensor:
    """By element, the error over what is allowed; inf where it is not finite and must be, 0 where it is not judged."""
    facts = torch.finfo(output.dtype)
    fits = result.abs() + allowed < facts.max * (1 - facts.eps)
    lost = ~output.isfinite() & fits
    excess = torch.where(fits & ~lost, (output.to(result.dtype) - result).abs() / allowed, 0.0)
    if bool(lost.any()) and judges_inf():
        excess = excess.masked_fill(lost, torch.inf)
    return excess


def _describe(index: int, place: int, output: Tensor, result: Tensor, allowed: Tensor, excess: Tensor) -> Offence:
    """The worst element beyond its bound."""
    worst = int(excess.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), output.shape))

    def at(x: Tensor) -> float:
        return float(x.reshape(-1)[worst])

    far, largest = abs(at(output) - at(result)), float(result.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    return Offence(
        index, place, where, at(output), at(result), far if far == far else float("inf"), largest,
        at(allowed.expand_as(result)), int((excess > 1.0).sum()) / output.numel(),
    )  # fmt: skip


def _gives_the_same_again(same: SameInputs, outputs: Sequence[Tensor | None]) -> bool:
    """Whether a foreign kernel gives the same numbers of the same inputs once more: else it draws some."""
    if same.call.schema.name.startswith("aten."):
        return True
    args, kwargs = _copy_arguments(same)
    with _undisturbed(same.call):
        again = run_aside(same.call, Wide(same.call.func, args, kwargs, outputs))
    own, new = ([t for t in results if t is not None] for results in (outputs, again))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(own, new, strict=False))


def _copy_arguments(same: SameInputs) -> tuple[list[Any], dict[str, Any]]:
    """What the operation was called with: what it wrote to, as it was before."""
    before = dict(zip(same.call.schema.names, same.wide.args, strict=False)) | same.wide.kwargs
    writes = same.call.schema.writes

    def own(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return before[name].to(value.dtype) if name in writes else value.detach().clone()
        if isinstance(value, (list, tuple)):
            return [own("", item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    names = same.call.schema.names
    args = [own(name, value) for name, value in zip(names, same.call.args, strict=False)]
    return args, {name: own(name, value) for name, value in same.call.kwargs.items()}
