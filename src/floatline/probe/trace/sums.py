"""Sums in 16 bits that stand still: `a + b == a` while b is not 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from floatline.probe.trace.schemas import TracedCall, tensors_of
from floatline.probe.trace.twin_rules import LOW, widened

_NAMES = frozenset(
    (
        *(f"{prefix}{name}" for name in ("add", "sub", "addcmul", "addcdiv", "lerp") for prefix in ("", "_foreach_")),
        *("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"),  # whole updates of weights
    )
)


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
    if call.schema.base not in _NAMES or call.schema.outs or any(t.dtype not in LOW for t in first):
        return []
    if any(a.tensor.layout is not torch.strided for a in call.tensors):
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


def count_stuck(sums: list[RunningSum | None], results: list[Tensor]) -> Tensor | None:
    """Elements that the exact sum changes, and those of them that came out unchanged."""
    counts = [
        torch.stack([moved.sum(), (moved & (one.before == result)).sum()])
        for one, result in zip(sums, results, strict=False)
        if one is not None and one.before.shape == result.shape
        for moved in [(one.exact != one.before) & one.exact.isfinite() & one.before.isfinite()]
    ]
    return torch.stack(counts).sum(0) if counts else None
