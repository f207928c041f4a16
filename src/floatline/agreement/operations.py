"""Which operation parts two computations: by the values that they make in FP32, or by the error that 16 bits add."""

# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.agreement.arithmetic import Widened
from floatline.agreement.place import OpPlace
from floatline.agreement.sides import Given, Side, run_side
from floatline.precision.user_frames import find_caller
from floatline.probe.trace.op_origins import OpOrigin, Whereabouts
from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.trace.trace import Op, Trace

Print = tuple[float, ...]
"""What a tensor holds, whatever its shape: how many numbers, how many of them finite, and sums of their powers."""
_MOST_NOTED = 4


@dataclass(frozen=True)
class LoggedOp:
    """One operation of a computation in FP32: its name and numbers, what it read and made, and where it stands."""

    name: str
    scalars: tuple[float, ...]
    read: tuple[Print, ...]
    made: tuple[Print, ...]
    origin: OpOrigin


class _Log(TorchDispatchMode):
    """Notes every operation with the prints of what it read and made."""

    def __init__(self, whereabouts: Whereabouts) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._whereabouts = whereabouts
        self.ops: list[LoggedOp] = []

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and note one operation; torch calls this."""
        call = TracedCall(func, args, kwargs or {})
        quiet = call.schema.view or call.schema.silent or call.schema.empty
        read = () if quiet else tuple(_print_of(a.tensor) for a in call.tensors)
        origin = self._whereabouts.locate(tracked=any(a.tensor.requires_grad for a in call.tensors))
        result = call.run()
        if quiet:
            self._whereabouts.remember(None, origin)
            return result
        self._whereabouts.remember(len(self.ops), origin, in_place=bool(call.schema.writes))
        made = tuple(_print_of(t) for t in (*tensors_of(result), *call.written) if t is not None)
        self.ops.append(LoggedOp(call.schema.name, call.numbers(), read, made, origin))
        return result


def _print_of(x: Tensor) -> Print:
    x = x.detach().to(torch.float64).flatten()
    fine = x[x.isfinite() & (x.abs() < 1e30)]
    if not fine.numel():
        return (float(x.numel()), 0.0, 0.0, 0.0, 0.0)
    # Sums over powers do not depend on the order; roots keep them comparable in relative size.
    return (
        float(x.numel()),
        float(fine.numel()),
        float(fine.sum()),
        float(fine.square().sum().sqrt()),
        float(torch.sign(s := (fine**3).sum()) * s.abs() ** (1 / 3)),
    )


def _same(a: Print, b: Print, within: float) -> bool:
    if a[:2] != b[:2]:
        return False
    size = max(abs(a[3]), abs(b[3])) * math.sqrt(max(a[0], 1.0)) + 1e-300
    return all(abs(x - y) <= within * size for x, y in zip(a[2:], b[2:], strict=True))


def match_operations(a: Side, b: Side, given: Given, *, dtype: torch.dtype, backward: bool) -> OpPlace | None:
    """The operation at which B begins to make other numbers than A, both in FP32; None where none can be named.

    Both are run with the same inputs and weights. A value of B that A makes nowhere is new; of the new values that the
    last one comes from, the first that is computed from numbers both have is where they part. Attention is computed
    from its parts, so that a kernel and attention that is written out have values in common.

    Args:
        a: The first side.
        b: The second side.
        given: The arguments of both.
        dtype: What stands for FP32.
        backward: Whether the backward passes are compared, too.
    """
    ours, theirs = (_log(side, given, dtype, backward=backward) for side in (a, b))
    within = 1e-9 if dtype == torch.float64 else 1e-5
    new = _find_new(theirs, ours, within)
    entry = _first_with_known_input(theirs, new, ours, within)
    if entry is None:
        return None
    other = _entry_op(ours, theirs, within)
    noted = [_where(theirs[i].origin) for i in new if i < entry and _where(theirs[i].origin)]
    op = theirs[entry]
    file, line = _own_line(op.origin.file, op.origin.line)
    return OpPlace(
        op=op.name,
        file=file,
        line=line,
        phase="backward" if op.origin.phase == "backward" else "forward",
        seen=_compare(op, other),
        also=tuple(dict.fromkeys(where for where in noted if where != _where(op.origin)))[-_MOST_NOTED:],
    )


def _entry_op(ours: list[LoggedOp], theirs: list[LoggedOp], within: float) -> LoggedOp | None:
    place = _first_with_known_input(ours, _find_new(ours, theirs, within), theirs, within)
    return None if place is None else ours[place]


def _log(side: Side, given: Given, dtype: torch.dtype, *, backward: bool) -> list[LoggedOp]:
    function = side.in_format(dtype)
    root = function if isinstance(function, nn.Module) else nn.Module()
    with Whereabouts(root, on_update=lambda _: None) as whereabouts, sdpa_kernel(SDPBackend.MATH):
        log = _Log(whereabouts)
        run_side(function, given, dtype=dtype, backward=backward, modes=[log, Widened(dtype)], around=side.around)
    return log.ops


def _find_new(own: Sequence[LoggedOp], other: Sequence[LoggedOp], within: float) -> list[int]:
    """Places of operations whose value the other does not make, and that lead to the last such value by new ones only.

    Backward operations are looked at only where no forward one is new.
    """
    known = _Prints([made for op in other for made in op.made], within)
    new = [i for i, op in enumerate(own) if op.made and not all(made in known for made in op.made)]
    forward = [i for i in new if own[i].origin.phase != "backward"]
    new = forward or new
    if not new:
        return []
    wanted = _Prints(list(own[new[-1]].read), within)
    kept = [new[-1]]
    for i in reversed(new[:-1]):
        if any(made in wanted for made in own[i].made):
            kept.append(i)
            wanted.add(own[i].read)
    return kept[::-1]


def _first_with_known_input(
    own: Sequence[LoggedOp], new: Sequence[int], other: Sequence[LoggedOp], within: float
) -> int | None:
    known = _Prints([p for op in other for p in (*op.made, *op.read)], within)
    for i in new:
        if any(p in known and p[3] and p[0] > 1 for p in own[i].read):
            return i
    return new[0] if new else None


class _Prints:
    """Prints that are looked up within a tolerance."""

    def __init__(self, prints: Sequence[Print], within: float) -> None:
        self._within = within
        self._by_size: dict[tuple[float, ...], list[Print]] = {}
        self.add(prints)

    def add(self, prints: Sequence[Print]) -> None:
        for one in prints:
            self._by_size.setdefault(one[:2], []).append(one)

    def __contains__(self, wanted: Print) -> bool:
        return any(_same(wanted, one, self._within) for one in self._by_size.get(wanted[:2], ()))


def _compare(op: LoggedOp, other: LoggedOp | None) -> str:
    if other is None:
        return f"{op.name} makes numbers that A makes nowhere"
    if op.name != other.name:
        return f"B computes {op.name} where A computes {other.name}"
    if op.scalars != other.scalars:
        ours, theirs = (", ".join(f"{number:g}" for number in one.scalars) for one in (other, op))
        return f"{op.name} has the numbers {ours} in A and {theirs} in B"
    return f"{op.name} reads other numbers than A's"


def _own_line(file: str, line: int) -> tuple[str, int]:
    """Not the line that asked for the comparison: it stands behind what torch's own modules do."""
    caller = find_caller()
    return ("", 0) if (file, line) == (caller.file, caller.line) else (file, line)


def _where(origin: OpOrigin) -> str:
    return f"{origin.file}:{origin.line}" if origin.file else ""


def find_rounding(side: Side, given: Given, *, backward: bool) -> OpPlace | None:
    """The line that adds the most error to a computation in its own arithmetic, by the FP32 twins of its operations.

    What a line adds is the error of what it makes, less the error of what it reads from other lines: so that a sum over
    many operations of one line counts as one. None where no operation has an error.
    """
    recorder = Recorder(side.module or nn.Module())
    run_side(side.plain, side.own_inputs(given), backward=backward, modes=[recorder], around=side.around)
    added = _errors_by_line(recorder.trace)
    if not added:
        return None
    (file, line, phase), (error, before, op, num) = max(added.items(), key=lambda item: item[1][0] - item[1][1])
    if error <= before:
        return None
    file, line = _own_line(file, line)
    times = f" ({num} operations)" if num > 1 else ""
    return OpPlace(
        op=op.name,
        file=file,
        line=line,
        phase="backward" if phase == "backward" else "forward",
        seen=f"{op.name}{times} makes an error of {error:.2g} from numbers with one of {before:.2g}",
    )


def _errors_by_line(trace: Trace) -> dict[tuple[str, int, str], tuple[float, float, Op, int]]:
    found: dict[tuple[str, int, str], tuple[float, float, Op, int]] = {}
    for op in trace.ops:
        errors = [v.error for v in op.outputs if v.error is not None and math.isfinite(v.error)]
        if not errors:
            continue
        key = (op.file, op.line, op.phase)
        read = [
            o.value.error
            for o in op.inputs
            if o.value.error is not None and (o.made_by is None or _line_of(trace, o.made_by) != key)
        ]
        before = max((e for e in read if math.isfinite(e)), default=0.0)
        worst, least, named, num = found.get(key, (0.0, 0.0, op, 0))
        found[key] = (
            max(worst, *errors),
            max(least, before),
            op if max(errors) >= worst else named,
            num + 1,
        )
    return found


def _line_of(trace: Trace, place: int) -> tuple[str, int, str]:
    op = trace.ops[place]
    return op.file, op.line, op.phase
