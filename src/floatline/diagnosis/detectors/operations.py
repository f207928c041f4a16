"""Operations of a trace: their kinds, where their operands come from, and poles that 16 bits round an operand onto."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from floatline.base.texts import percent
from floatline.formats import find_format
from floatline.probe.trace.trace import Op, Operand, Trace, Values

FORMATS = {"float16": "fp16", "bfloat16": "bf16"}
# An error against FP32 from which a tensor counts as touched by damage before it.
TOUCHED = 0.01
# A difference that differs from its FP32 twin by more than this is damaged.
HARM = 0.05
# What `torch.finfo(x.dtype).eps` is in 16 bits. FP32 has another constant there.
EPS_OF_FORMATS = frozenset(find_format(name).epsilon for name in FORMATS.values())
# An eps is no small part of what it is added to from this share of it on.
EPS_WEIGHS = 0.01


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MATMULS = _names(
    """mm addmm bmm baddbmm addbmm mv addmv dot vdot linear convolution _convolution conv_transpose2d einsum
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention scaled_dot_product_attention lstm gru _thnn_fused_lstm_cell"""
)
# Sums of what is there: divided by, they are counts.
COUNTS = _names("sum nansum index_add scatter_add scatter_reduce index_reduce index_put count_nonzero bincount cumsum")
SCATTERED = _names("index_add scatter_add")
NORMS = _names("norm linalg_vector_norm dist cdist _cdist_forward _euclidean_dist")
SPREADS = _names("std var std_mean var_mean")
SUMS = (
    COUNTS
    | NORMS
    | SPREADS
    | _names(
        """mean logsumexp avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_avg_pool1d segment_reduce native_layer_norm native_batch_norm native_group_norm mse_loss trace
        embedding_bag _embedding_bag _native_batch_norm_legit renorm"""
    )
)
PRODUCTS = _names("mul pow square prod cumprod addcmul")
EXPONENTIALS = _names("exp exp2 expm1 sinh cosh special_exp2 special_expm1")
ADDITIONS = _names("add sub rsub lerp")
FILLS = _names("masked_fill fill full full_like where clamp clamp_min clamp_max scalar_tensor constant_pad_nd")
# Operations with a point where they, or their slopes, are not finite: at 0, and at -1, 0 or 1.
POLES = _names("div reciprocal log log2 log10 log1p sqrt rsqrt pow xlogy lgamma digamma special_entr")
ENDS = _names("acos asin atanh logit acosh erfinv special_xlog1py")
AT_ZERO = POLES - {"log1p"} | {"logit"}
AT_ONE = ENDS | {"log1p"}
# Operations that make a large error of a small one where what they read is large against their period.
PERIODIC = _names("sin cos tan remainder fmod frac")
CLAMPS = _names("clamp clamp_min clamp_max minimum maximum")
CASTS = _names("_to_copy to copy")
# Operations that hand numbers on as they are.
CARRIERS = CASTS | _names(
    """cat stack clone contiguous index index_select gather embedding where masked_fill relu max_pool2d_with_indices
    repeat roll flip neg abs constant_pad_nd detach select_scatter slice_scatter"""
)
# Operations whose slopes do not depend on what they are given.
LINEAR = (
    CASTS
    | ADDITIONS
    | _names("sum nansum mean neg cat stack clone contiguous index_select gather repeat detach ones_like zeros_like")
)


def base_name(name: str) -> str:
    """'aten.add_' is 'add'."""
    name = name.removeprefix("aten.").split(".")[0]
    return name.rstrip("_") or name


def ancestors(operand: Operand, trace: Trace, depth: int) -> Iterator[Op]:
    """The operation that made an operand, and those before it, nearest first."""
    if operand.made_by is None or depth == 0:
        return
    op = trace.ops[operand.made_by]
    yield op
    for own in op.inputs:
        yield from ancestors(own, trace, depth - 1)


def maker_of(operand: Operand, trace: Trace) -> Op | None:
    """The operation that made an operand's numbers, through casts and copies."""
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        if base_name(op.name) not in CASTS or not op.inputs:
            return op
        operand = op.inputs[0]
    return None


def find_rounding(operand: Operand, trace: Trace) -> Op | None:
    """The last operation that rounded an operand's numbers to 16 bits; None where that was before the step."""
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        made = op.outputs[0].dtype if op.outputs else ""
        if made in FORMATS:
            same = [own for own in op.inputs if own.value.dtype == made] if base_name(op.name) in CARRIERS else []
            if not same:  # what only hands numbers on, as a mask that is filled in does, rounds nothing
                return op
            operand = max(same, key=lambda own: own.value.error or 0.0)
        elif base_name(op.name) in CASTS and op.inputs:
            operand = op.inputs[0]
        else:
            return None
    return None


def source_of(operand: Operand, trace: Trace) -> Operand:
    """The operand that holds the same largest number first, through all that only hands it on."""
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        if base_name(op.name) not in CARRIERS:
            break
        larger = [own for own in op.inputs if own.value.largest >= operand.value.largest > 0.0]
        if not larger:
            break
        operand = larger[0]
    return operand


def reached_by(birth: Op, trace: Trace) -> set[int]:
    """Indices of the operations that the damage of one got to, itself included.

    Inf that is swallowed leaves an error against FP32, so both count; a mask's -inf that the softmax turns into the
    same 0 as in FP32 ends there.
    """
    touched = {birth.index}
    for op in trace.ops[birth.index + 1 :]:
        if any(own.made_by in touched for own in op.inputs) and any(map(_is_touched, op.outputs)):
            touched.add(op.index)
    return touched


def reaches_gradient(birth: Op, trace: Trace) -> bool:
    """Whether the damage of an operation got into a parameter's gradient."""
    touched = reached_by(birth, trace)
    return any(gradient.made_by in touched and _is_touched(gradient.value) for gradient in trace.gradients.values())


def _is_touched(value: Values) -> bool:
    if value.blown is None or value.error is None:
        return value.dtype.startswith(("float", "bfloat"))  # not known: no twin
    return bool(value.blown) or value.error > TOUCHED


def first_holder(operand: Operand, trace: Trace) -> Op | None:
    """The operation with which an operand's -inf came into the step; None where it came from outside."""
    holder: Op | None = None
    while operand.made_by is not None:
        holder = trace.ops[operand.made_by]
        bearing = [own for own in holder.inputs if own.value.neg_inf]
        if not bearing:
            return holder
        operand = bearing[0]
    return None


@dataclass(frozen=True)
class Pole:
    """An operand that was rounded onto a point at which its operation is singular.

    Args:
        cause: Id of the cause.
        seen: The numbers.
        rounded: The operation that rounded it, where that is known.
    """

    cause: str
    seen: str
    rounded: Op | None = None


def find_pole(op: Op, trace: Trace) -> Pole | None:
    """The operand that was rounded onto a point at which the operation is singular; None where none was."""
    name = base_name(op.name)
    for place, operand in enumerate(op.inputs):
        value = operand.value
        if name in {"div", "xlogy"} and place == 0 and len(op.inputs) > 1:
            continue  # the numerator
        if value.lost and is_singular_at_zero(op):
            guard = _lost_guard(operand, trace)
            if guard is not None:
                seen = f"{value.lost:,} operands of {name} are 0: the guard {guard[0]:g} rounds to 0 in {guard[1]}"
                return Pole("eps-underflow", seen)
            seen = f"{value.lost:,} operands of {name} are exactly 0 in {_narrowest(operand, trace)} and not in FP32"
            return Pole("rounded-onto-singularity", seen, _find_first_rounding(operand, trace))
        top = value.twin_largest
        if name in AT_ONE and top is not None and value.largest >= 1.0 > top:
            seen = f"an operand of {name} is exactly 1 in {_narrowest(operand, trace)} and {top:.9g} in FP32"
            return Pole("rounded-onto-singularity", seen, _find_first_rounding(operand, trace))
    return None


def _find_first_rounding(operand: Operand, trace: Trace) -> Op | None:
    """The operation that rounded an operand onto a pole; None where that was before the step.

    A difference that is 0 is exact, and a clamp rounds nothing: what they read was rounded before, as `p` of
    `1 - p.clamp(max=1 - 1e-7)`.
    """
    may_differ = True
    while operand.made_by is not None:
        op = trace.ops[operand.made_by]
        hands_on = base_name(op.name) in (CLAMPS | ADDITIONS if may_differ else CLAMPS) | CARRIERS
        rounded = [own for own in op.inputs if own.value.error]
        if not (hands_on and rounded):
            return op if any(out.dtype in FORMATS for out in op.outputs) else None
        may_differ = may_differ and base_name(op.name) not in ADDITIONS
        operand = max(rounded, key=lambda own: own.value.error or 0.0)
    return None


def is_singular_at_zero(op: Op) -> bool:
    """Whether the operation or its slope is infinite at 0: a power is from an exponent below 1 on."""
    name = base_name(op.name)
    if name != "pow" or len(op.inputs) > 1:
        return name in AT_ZERO
    return any(exponent < 1.0 for exponent in op.scalars)


def cancelled_before(op: Op, trace: Trace) -> tuple[Op, str] | None:
    """The difference that went below zero, where only a root or a logarithm of it shows the damage."""
    if not any(out.nan for out in op.outputs) or any(operand.value.lost for operand in op.inputs):
        return None
    for operand in op.inputs:
        for maker in ancestors(operand, trace, 3):
            if base_name(maker.name) in ADDITIONS and maker.outputs and (maker.outputs[0].error or 0.0) > HARM:
                out = maker.outputs[0]
                return (
                    maker,
                    f"a difference of {out.twin_largest:.3g} is off by {percent(out.error or 0.0)}, and below 0",
                )
    return None


def find_large_eps(op: Op) -> float | None:
    """The eps of a 16-bit format that an operation adds, or bounds by, and that weighs against what it reads."""
    if base_name(op.name) not in ADDITIONS | {"clamp", "clamp_min"} or not op.inputs or op.phase == "backward":
        return None
    value = op.inputs[0].value
    if value.dtype not in FORMATS and not value.error:
        return None
    weighs = min(value.smallest, EPS_WEIGHS * value.largest)
    return next((scalar for scalar in op.scalars if scalar in EPS_OF_FORMATS and scalar > weighs > 0.0), None)


def _narrowest(operand: Operand, trace: Trace) -> str:
    """The 16-bit dtype that an operand has, or had before autocast widened it."""
    made = (out.dtype for op in ancestors(operand, trace, 4) for out in op.outputs)
    return next((dtype for dtype in (operand.value.dtype, *made) if dtype in FORMATS), operand.value.dtype)


def _lost_guard(operand: Operand, trace: Trace, depth: int = 4) -> tuple[float, str] | None:
    """A constant that was added to keep an operand from zero, and the dtype in which it is zero itself; else None."""
    for op in ancestors(operand, trace, depth):
        if base_name(op.name) not in ADDITIONS | {"clamp", "clamp_min", "maximum"}:
            continue
        dtype = op.outputs[0].dtype if op.outputs else ""
        if dtype not in FORMATS:
            continue
        zero_at = find_format(FORMATS[dtype]).zero_at
        for scalar in op.scalars:
            if 0 < abs(scalar) <= zero_at:
                return scalar, dtype
        for other in op.inputs:
            # A constant tensor that became zero in the cast, or that the sum turns into zero.
            if other.value.numel == 1 and (other.value.lost or 0 < other.value.largest <= zero_at):
                return other.value.twin_largest or 0.0, dtype
    return None
