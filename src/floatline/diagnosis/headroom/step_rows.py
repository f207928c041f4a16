"""Row: what one module wrote in a step, forward and backward, held against a format. Without torch."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from floatline.diagnosis.detectors.operations import base_name
from floatline.findings import Finding
from floatline.formats import Format, find_format
from floatline.numerics.ranges import Ranges, measure_ranges
from floatline.probe.trace.op_origins import Whereabouts
from floatline.probe.trace.schemas import TracedCall
from floatline.probe.trace.trace import Op, Trace, Values
from floatline.probe.watch.patches import Aside


class SpanRecorder(TorchDispatchMode):
    """Counts the exponents of the operands of some operations, forward and backward, without changing a bit.

    Args:
        model: Gives modules their names.
        kinds: Names of the operations, such as 'mm'.
    """

    def __init__(self, model: nn.Module, *, kinds: Collection[str]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._kinds = frozenset(kinds)
        self._whereabouts = Whereabouts(model, on_update=lambda _: None)
        self._found: list[tuple[Op, list[Ranges]]] = []

    def __enter__(self) -> SpanRecorder:
        self._whereabouts.__enter__()
        super().__enter__()  # pyright: ignore[reportUnknownMemberType]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        self._whereabouts.__exit__()

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and count what it reads; torch calls this."""
        del types
        call = TracedCall(func, args, kwargs or {})
        origin = self._whereabouts.locate(tracked=any(a.tensor.requires_grad for a in call.tensors))
        index = len(self._found)
        self._whereabouts.remember(index, origin, in_place=bool(call.schema.writes))
        name = base_name(call.schema.name).removesuffix("_backward")
        if name in self._kinds:
            op = Op(index, call.schema.name, origin.phase, origin.module, origin.file, origin.line, origin.function)
            with Aside():
                self._found.append((op, [measure_ranges(t) for a in call.tensors if _is_measured(t := a.tensor)]))
        return call.run()

    def spans(self) -> list[tuple[Op, list[dict[int, int]]]]:
        """For each operation, how many numbers of each operand lie in [2**k, 2**(k+1)), by k."""
        return [(op, [ranges.exponents for ranges in operands]) for op, operands in self._found]


def _is_measured(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() > 1


State = Literal["fits", "sinks", "nonfinite", "overflows"]
_NARROW = ("float16", "bfloat16")
_MOSTLY = 0.5  # a tensor that loses this share of its values sinks; a few small ones are lost in every healthy step
_MOST_ROWS = 20
_ENOUGH_ROWS = 8  # of those that fit, no more than this are worth a look


@dataclass(frozen=True)
class Span:
    """The magnitudes of all tensors that a module wrote in one pass, in the format.

    Args:
        smallest: Smallest finite magnitude above 0; inf where there is none.
        largest: Largest finite magnitude; 0 where there is none.
        reach: Largest magnitude that FP32 has in their place; 0 where it is not known.
        lost: Share of the values other than 0 that became 0, in the tensor that loses most.
        state: 'overflows' where FP32's values leave the range; 'nonfinite' where inf or NaN came otherwise; 'sinks'
            where a tensor loses half of its values or more below the range, or a gradient all of them.
    """

    smallest: float
    largest: float
    reach: float
    lost: float
    state: State


@dataclass(frozen=True)
class Row:
    """One module. A pass in which it wrote nothing in the format is None.

    Args:
        module: Qualified name; '' is the root, and code outside of modules such as the loss.
        format: What the spans are held against.
        forward: What it wrote in forward.
        backward: The gradients that its operations wrote, scaled as they were.
        blamed: Whether the primary finding names it.
    """

    module: str
    format: Format
    forward: Span | None
    backward: Span | None
    blamed: bool = False

    @property
    def spans(self) -> tuple[Span, ...]:
        """Those that there are."""
        return tuple(span for span in (self.forward, self.backward) if span is not None)

    @property
    def fits(self) -> bool:
        """Whether nothing in it overflows, sinks or is non-finite."""
        return all(span.state == "fits" for span in self.spans)

    @property
    def room(self) -> float:
        """Powers of two between its largest values and the nearer limit of the format."""
        tops = [math.log2(span.largest) for span in self.spans if span.largest > 0]
        ceiling = math.log2(self.format.max)
        return min((min(ceiling - top, top - self.format.min_exponent) for top in tops), default=math.inf)


def chart_rows(trace: Trace, to: Format | str, *, finding: Finding | None = None) -> list[Row]:
    """A row for each module that wrote numbers of the format, in the order of execution.

    Tensors of other formats are left out: what is in FP32 cannot hurt itself on FP16's limits.

    Args:
        trace: Of the step.
        to: The format.
        finding: The primary one; the row of its module is marked.
    """
    fmt = find_format(to)
    written: dict[str, dict[str, list[Values]]] = {}
    for op in trace.ops:
        values = [value for value in op.outputs if value.numel and _is_of(value, fmt)]
        if values and op.phase in ("forward", "backward") and not _is_harmless_cast(op):
            written.setdefault(op.module, {}).setdefault(_pass_of(op), []).extend(values)
    blamed = None if finding is None else _blamed_module(finding, written)
    rows: list[Row] = []
    for module, passes in written.items():
        forward = _span(passes.get("forward", ()), fmt, gradients=False)
        backward = _span(passes.get("backward", ()), fmt, gradients=True)
        rows.append(Row(module, fmt, forward, backward, module == blamed))
    return rows


def rows_of_diagnosis(traces: Iterable[Trace], finding: Finding | None) -> tuple[Row, ...]:
    """The rows of the trace that shows what a finding names, or of the first that has any; none without a finding."""
    if finding is None:
        return ()
    charts = [chart_rows(trace, fmt, finding=finding) for trace in traces if (fmt := narrow_format(trace)) is not None]
    telling = (rows for rows in charts if any(row.blamed and not row.fits for row in rows))
    return tuple(next(telling, charts[0] if charts else ()))


def narrow_format(trace: Trace) -> Format | None:
    """The 16-bit format that most operations of a step write; None where none does."""
    dtypes = Counter(value.dtype for op in trace.ops for value in op.outputs if value.dtype in _NARROW)
    return find_format(dtypes.most_common(1)[0][0]) if dtypes else None


def rows_that_matter(rows: Sequence[Row]) -> list[Row]:
    """At most 20 rows in their order: the blamed one, those beyond a limit, then a few that are nearest to one."""
    blamed = [row for row in rows if row.blamed]
    beyond = [row for row in rows if not row.blamed and not row.fits]
    within = sorted((row for row in rows if not row.blamed and row.fits), key=lambda row: row.room)
    chosen = (blamed + beyond)[:_MOST_ROWS]
    chosen += within[: max(_ENOUGH_ROWS - len(chosen), 0)]
    kept = {row.module for row in chosen}
    return [row for row in rows if row.module in kept]


def _blamed_module(finding: Finding, modules: Iterable[str]) -> str | None:
    """The module that a finding names, by itself or by a parameter of it; None where it names no place."""
    if not finding.module:
        return "" if finding.op or finding.line else None
    known = set(modules)
    name = finding.module
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def _is_of(value: Values, fmt: Format) -> bool:
    return value.dtype == fmt.name or value.dtype in fmt.aliases


def _is_harmless_cast(op: Op) -> bool:
    """Whether it makes the 16-bit copy of a weight: the module's numbers are what it computes with that."""
    copies = op.name == "aten._to_copy" and any(operand.role.startswith("param:") for operand in op.inputs)
    return copies and not any(value.nonfinite for value in op.outputs)


def _pass_of(op: Op) -> str:
    return "forward" if op.recomputed else op.phase


def _span(values: Sequence[Values], fmt: Format, *, gradients: bool) -> Span | None:
    if not values:
        return None
    states = {_state(value, fmt, gradient=gradients) for value in values}
    order: tuple[State, ...] = ("overflows", "nonfinite", "sinks", "fits")
    return Span(
        smallest=min(value.smallest for value in values),
        largest=max(value.largest for value in values),
        reach=max(value.twin_largest or 0.0 for value in values),
        lost=max(_share_lost(value) for value in values),
        state=next(state for state in order if state in states),
    )


def _state(value: Values, fmt: Format, *, gradient: bool) -> State:
    if _num_broken(value):
        return "overflows" if (value.twin_largest or 0.0) >= fmt.cast_edges[2] else "nonfinite"
    lost = _share_lost(value)
    if lost < _MOSTLY:
        return "fits"
    # What is left, or FP32's largest, tells whether values fell below the floor or met zero by rounding: 1 + x - 1.
    low = value.smallest if value.largest else value.twin_largest or 0.0
    no_gradient = gradient and lost == 1.0  # it was lost before, and nothing came of it here
    return "sinks" if low < fmt.min_normal or no_gradient else "fits"


def _num_broken(value: Values) -> int:
    """Elements that are inf or NaN by damage: a mask of -inf is none, and its twin has it, too."""
    if value.blown is None:
        return value.nan + value.pos_inf
    return max(value.blown, value.nan)


def _share_lost(value: Values) -> float:
    lost = value.lost or 0
    return lost / (value.numel - value.zeros + lost) if lost else 0.0
