"""would_fit: what of an FP32 or BF16 step would not fit a narrower format, with the headroom in bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from floatline.diagnosis.detectors.loss_scale import MARGIN
from floatline.diagnosis.detectors.operations import ADDITIONS, FILLS, MATMULS, base_name
from floatline.diagnosis.detectors.silent import LOST_SHARE
from floatline.errors import FormatError, ReplayError
from floatline.formats import Format, find_format
from floatline.numerics.ranges import measure_ranges
from floatline.precision.islands import Line, LineIslands
from floatline.precision.user_frames import find_raiser
from floatline.probe.runs.target_points import capture_points
from floatline.probe.steps.captured_step import CapturedStep, Precision
from floatline.probe.trace.trace import Op, Trace, Values
from floatline.workload import Target, Workload

Kind = Literal["activation", "gradient", "weight", "constant", "refused"]
_MOST_REFUSED = 8
_SIXTEEN = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class FitRow:
    """The numbers of one operation, or of one weight, against a format.

    Args:
        kind: What they are; 'refused' is a line that raises in the format.
        module: The module; '' is the model's own code, or code outside of it.
        op: The operation, such as 'mm'; the parameter's name for a weight, and torch's message
            for a line that raises.
        file: The user's file; '' where there is none.
        line: Line in it.
        largest: Largest magnitude in FP32, the loss scale in it.
        headroom: Bits between that and the largest number of the format; below 0 it overflows. For a constant that
            is too small: bits above half the smallest number, below 0 as it is 0.
        lost: Share of the numbers other than 0 that the format makes 0.
        fits: Whether it neither overflows nor loses what counts.
    """

    kind: Kind
    module: str
    op: str
    file: str
    line: int
    largest: float
    headroom: float
    lost: float
    fits: bool


@dataclass(frozen=True)
class FormatFit:
    """How a run would fit a format.

    Args:
        format: Its name.
        scale: The loss scale that was assumed; None where each tensor has its own scale.
        rows: Each operation and weight, at its worst over the steps, the least headroom first.
        steps: Numbers of the steps.
    """

    format: str
    scale: float | None
    rows: tuple[FitRow, ...]
    steps: tuple[int, ...]

    @property
    def unfit(self) -> tuple[FitRow, ...]:
        """What would not fit, the worst first."""
        return tuple(row for row in self.rows if not row.fits)

    def as_json(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "format": self.format,
            "fits": not self.unfit,
            "scale": self.scale,
            "steps": list(self.steps),
            "unfit": [asdict(row) for row in self.unfit],
            "headroom": min((row.headroom for row in self.rows), default=None),
        }


def would_fit(
    subject: Target | Workload | CapturedStep | Sequence[CapturedStep],
    *,
    formats: Sequence[str] = ("fp16",),
    scale: float | None = None,
    steps: int = 40,
    seed: int = 0,
) -> list[FormatFit]:
    """Whether a run in FP32 or BF16 would fit narrower formats, before anyone trains in them.

    16-bit formats: each captured step is computed once under autocast of that format, beside its FP32 values. What
    counts are the FP32 values of those operations that would be 16-bit; so an overflow does not hide the next.
    8-bit formats: operands of matrix products and convolutions, forward and backward, each tensor with a scale of its
    own that brings its largest number to that of the format, as FP8 training has it. They cannot overflow: what
    counts is how many bits they span. Their headroom is what is left of the format's range below the numbers that
    matter, all but a twentieth.

    Numerics:
        Largest magnitudes are exact. Shares are counts; for 8 bits they are by powers of two, so a number up to
        twice the smallest that is kept may count as kept. Gradients are those at `scale`. On a CPU, the operations
        that would be 16-bit are those of autocast on a CPU. Checked by tests/diagnosis/headroom/test_would_fit.py.

    Args:
        subject: A target or workload, trained in its own FP32 or BF16 precision to capture steps; or captured steps.
        formats: Names, such as 'fp16' and 'fp8_e4m3fn'.
        scale: The loss scale for 16-bit gradients; None is the largest power of two that leaves two bits of room, or 1
            for a format with the range of FP32.
        steps: Of the run, for a target or workload.
        seed: Of that run.

    Raises:
        FormatError: A format is not known, or is not narrower than FP32.
    """
    wanted = [find_format(name) for name in formats]
    for fmt in wanted:
        if fmt.bits > 16:
            raise FormatError(f"Format '{fmt.name}' is as wide as FP32. Ask for fp16, bf16 or an 8-bit format.")
    if isinstance(subject, (Target, Workload)):
        subject = capture_points(subject, steps=steps, seed=seed)
    captured = [subject] if isinstance(subject, CapturedStep) else list(subject)
    return [_fit_sixteen(captured, f, scale) if f.name in _SIXTEEN else _fit_eight(captured, f) for f in wanted]


def _fit_sixteen(steps: Sequence[CapturedStep], fmt: Format, scale: float | None) -> FormatFit:
    refused: dict[Line, FitRow] = {}
    traces = [_trace(step, fmt, scale or 1.0, refused) for step in steps]
    if scale is None:
        scale = _best_scale(traces, fmt)
        if scale != 1.0:
            traces = [_trace(step, fmt, scale, refused) for step in steps]
    rows = [row for trace in traces for op in trace.ops for row in _rows_of(op, fmt)]
    rows += [*refused.values(), *(row for step in steps for row in _rows_of_weights(step, fmt))]
    return _collect(fmt, scale, rows, steps)


def _trace(step: CapturedStep, fmt: Format, scale: float, refused: dict[Line, FitRow]) -> Trace:
    """The step in a 16-bit format. A line that raises there is noted, and left in FP32 to see the rest."""
    for _ in range(_MOST_REFUSED):
        trace = _try_trace(step, fmt, scale, refused)
        if trace is not None:
            return trace
    raise ReplayError(f"More than {_MOST_REFUSED} lines raise in {fmt.name}. Fix the first: {next(iter(refused))}.")


def _try_trace(step: CapturedStep, fmt: Format, scale: float, refused: dict[Line, FitRow]) -> Trace | None:
    precision = cast("Precision", fmt.name)
    try:
        with LineIslands(tuple(refused)) if refused else contextlib.nullcontext():
            return step.replay(precision=precision, scale=scale, trace=True).trace
    except RuntimeError as error:
        spot = find_raiser(error.__traceback__)
        if not spot.line or (spot.file, spot.line) in refused:
            raise
        words = next(iter(str(error).splitlines()), "")
        row = FitRow("refused", "", words, spot.file, spot.line, math.nan, -math.inf, 0.0, fits=False)
        refused[spot.file, spot.line] = row
        return None


def _best_scale(traces: Sequence[Trace], fmt: Format) -> float:
    """The largest power of two at which all gradients leave the margin; 1 for a format with the range of FP32."""
    tops = [
        out.twin_largest or 0.0
        for trace in traces
        for op in trace.ops
        if op.phase == "backward"
        for out in op.outputs
        if out.dtype == _SIXTEEN[fmt.name]
    ]
    top = max(tops, default=0.0)
    if not top or fmt.exponent_bits == find_format("fp32").exponent_bits:
        return 1.0
    return 2.0 ** math.floor(math.log2(fmt.max / MARGIN / top))


def _rows_of(op: Op, fmt: Format) -> list[FitRow]:
    narrow = [out for out in op.outputs if out.dtype == _SIXTEEN[fmt.name] and out.numel]
    if op.phase not in ("forward", "backward") or not narrow:
        return []
    kind: Kind = "activation" if op.phase == "forward" else "gradient"
    rows = [_row(kind, op, fmt, _largest(out), _lost(out)) for out in narrow]
    # A factor is no number of the format: products take it in FP32, and only the result must fit.
    for number in op.scalars if base_name(op.name) in ADDITIONS | FILLS else ():
        if number and math.isfinite(number) and (abs(number) > fmt.max or abs(number) <= fmt.zero_at):
            too_large = abs(number) > fmt.max
            headroom = math.log2(fmt.max / abs(number)) if too_large else math.log2(abs(number) / fmt.zero_at)
            place = (op.module, base_name(op.name), op.file, op.line)
            rows.append(FitRow("constant", *place, abs(number), headroom, float(not too_large), fits=False))
    return rows


def _largest(out: Values) -> float:
    return out.largest if out.twin_largest is None else out.twin_largest


def _lost(out: Values) -> float:
    """Share of the numbers that FP32 has and the format makes 0."""
    lost = out.lost or 0
    nonzero = out.numel - (out.zeros - lost)
    return lost / nonzero if nonzero else 0.0


def _row(kind: Kind, op: Op, fmt: Format, largest: float, lost: float) -> FitRow:
    headroom = math.log2(fmt.max / largest) if largest else math.inf
    # Small activations that become 0 rarely matter: probabilities, the tails of a gate. Lost gradients do.
    fits = largest < fmt.cast_edges[2] and (kind == "activation" or lost <= LOST_SHARE)
    return FitRow(kind, op.module, base_name(op.name), op.file, op.line, largest, headroom, lost, fits)


def _rows_of_weights(step: CapturedStep, fmt: Format) -> list[FitRow]:
    rows: list[FitRow] = []
    for name, tensor in step.state.captured.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        ranges = measure_ranges(tensor, fmt)
        fit = ranges.against(fmt)
        lost, headroom = fit.share(fit.to_zero), math.log2(fmt.max / ranges.largest) if ranges.largest else math.inf
        fits = not fit.overflow and lost <= LOST_SHARE
        rows.append(FitRow("weight", name.rpartition(".")[0], name, "", 0, ranges.largest, headroom, lost, fits))
    return rows


def _fit_eight(steps: Sequence[CapturedStep], fmt: Format) -> FormatFit:
    from floatline.diagnosis.headroom.step_rows import SpanRecorder

    rows: list[FitRow] = []
    for step in steps:
        with SpanRecorder(step.model, kinds=MATMULS) as recorder:
            step.replay(precision="fp32")
        for op, spans in recorder.spans():
            rows += [_row_of_span(op, fmt, span) for span in spans if span]
    return _collect(fmt, None, rows, steps)


def _row_of_span(op: Op, fmt: Format, exponents: dict[int, int]) -> FitRow:
    """A tensor that is scaled so that its largest number is just below the format's."""
    kind: Kind = "activation" if op.phase == "forward" else "gradient"
    top, total = max(exponents), sum(exponents.values())
    lowest = math.frexp(fmt.min_subnormal)[1] - 1  # exponent of the smallest number that is kept
    shift = math.frexp(fmt.max)[1] - 1 - top
    lost = sum(n for e, n in exponents.items() if e + shift < lowest - 1) / total
    seen, quiet = 0, top
    for exponent in sorted(exponents):
        seen += exponents[exponent]
        if seen > LOST_SHARE * total:
            quiet = exponent
            break
    headroom = float(quiet + shift - (lowest - 1))
    place = (op.module, base_name(op.name), op.file, op.line)
    return FitRow(kind, *place, 2.0**top, headroom, lost, fits=lost <= LOST_SHARE)


def _collect(fmt: Format, scale: float | None, rows: Sequence[FitRow], steps: Sequence[CapturedStep]) -> FormatFit:
    """Each place at its worst, the least headroom first; then by name, so that the order is always the same."""
    worst: dict[tuple[str, ...], FitRow] = {}
    for row in sorted(rows, key=lambda r: (r.fits, r.headroom, -r.lost, r.kind, r.module, r.op, r.file, r.line)):
        worst.setdefault((row.kind, row.module, row.op, row.file, str(row.line)), row)
    return FormatFit(fmt.name, scale, tuple(worst.values()), tuple(step.origin.step for step in steps))
