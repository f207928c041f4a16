"""Kernels: operations whose results are farther from FP32's on the same inputs than their format allows."""

from __future__ import annotations

from typing import Any

from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.diagnosis.detectors.operations import base_name
from floatline.findings import Finding
from floatline.probe.trace.trace import Op, Trace

# So many kernels are told of; a wrong one may be called with several shapes.
_MOST = 3
# A kernel that is off by less of its largest number makes no step fail.
_RUINOUS = 1 / 16


def find_wrong_kernels(trace: Trace, *, until: Op | None = None, ruinous: bool = False) -> list[Finding]:
    """A finding for each wrong kernel, in the order in which they ran; one for each kernel and line.

    Args:
        trace: A recorded step.
        until: Only those that ran up to this operation; None asks for all.
        ruinous: Only those that are off by enough to make a step fail: by inf, or by 1/16 of the largest number that
            FP32 gives.
    """
    found: dict[tuple[str, str, int], Finding] = {}
    offences: list[dict[str, Any]] = trace.meta.get("kernels", [])
    for offence in offences:
        op = trace.ops[int(offence["op"])]
        if ruinous and offence["error"] <= _RUINOUS * offence["largest"]:
            continue
        if until is None or op.index <= until.index:
            found.setdefault((op.name, op.file, op.line), _describe(offence, op))
    return [*found.values()][:_MOST]


def _describe(offence: dict[str, Any], op: Op) -> Finding:
    cause = find_cause("kernel-off")
    name = base_name(op.name) if op.name.startswith("aten.") else op.name
    place = f"[{', '.join(map(str, offence['place']))}]" if offence["place"] else "its only element"
    seen = (
        f"{name} gives {offence['value']:.4g} at {place}, and in FP32 on the same inputs {offence['expected']:.4g}: "
        f"off by {offence['error']:.3g}, where {offence['allowed']:.3g} is what its format and sums allow; "
        f"so are {percent(offence['share'])} of its elements"
    )
    return Finding(cause, seen, cause.advice, op.module, op.file, op.line, op.name)
