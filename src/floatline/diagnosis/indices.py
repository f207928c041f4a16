"""Whole numbers that came through 16 bits, and the operations that refuse them as an index."""

from __future__ import annotations

from dataclasses import replace

from floatline.diagnosis.births import FORMATS, Birth, ancestors, describe_birth
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.silent import colliding_casts
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.probe.trace import Op

# Operations between a cast and the index that is made of it: hardly more.
_FAR = 8


def describe_collision(op: Op, largest: float) -> Finding:
    """The finding about an operation that turns whole numbers into 16 bits.

    Args:
        op: The operation.
        largest: The largest of the numbers.
    """
    dtype = op.outputs[0].dtype
    exact = find_format(FORMATS[dtype]).max_exact_integer
    seen = f"numbers up to {largest:g} become {dtype}, which holds whole numbers up to {exact:g} only"
    found = describe_birth(Birth(op, "integer-not-exact", seen))
    made_here = "arange" in op.name
    return found if made_here else replace(found, fix=found.cause.remedies[1])


def find_wrong_indices(evidence: Evidence) -> list[Finding]:
    """Why an operation refuses an index that FP32 does not give it: it came through 16 bits."""
    failure = evidence.given.exception
    if failure is None or evidence.fp32.exception is not None:
        return []
    trace = evidence.trace(failure.step)
    raised = None if trace is None else trace.meta.get("exception")
    if trace is None or raised is None:
        return []
    number: int = raised["op"]
    inputs = trace.ops[number].inputs
    indices = [operand for operand in inputs if operand.value.dtype.startswith(("int", "uint"))]
    makers = {maker.index for operand in indices for maker in ancestors(operand, trace, _FAR)}
    for op, largest in colliding_casts(trace):
        if op.index in makers:
            evidence.found_in = trace
            found, message = describe_collision(op, largest), failure.message.partition("\n")[0]
            seen = f"{failure.kind}: {message}, which FP32 does not raise; {found.seen}"
            return [replace(found, seen=seen, fix="ids = ids.long()  # an index stays whole, or goes through FP32")]
    return []
