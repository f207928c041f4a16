"""What recorded steps say of a run: damage is what 16 bits do, and not what their FP32 twins cannot follow."""

import math

import pytest

from floatline.diagnosis.scripts.evidence import ScriptEvidence, make_target, stand_in_for_fp32
from floatline.probe.runs.records import RunRecord
from floatline.probe.scripts.steps import Captured
from floatline.probe.trace.trace import Operand, Trace, Values


def evidence_of(error, gradient):
    values = Values("float32", (4,), 4, largest=1.0, twin_largest=1.0, **gradient)
    trace = Trace([], {"weight": Operand(values, None, "")}, {"gradients": {"error": error}})
    given = RunRecord(kind="train", entry="", precision="fp16-mixed", file="")
    return ScriptEvidence(
        make_target(""),
        0,
        given,
        stand_in_for_fp32(given),
        lambda _: None,
        captured=[Captured(0, "healthy", trace, 0.0)],
    )


@pytest.mark.parametrize(
    ("error", "gradient", "behind"),
    [
        (0.01, {}, False),
        (0.5, {}, True),
        # A mask of the step's own zeros leaves those of its twin as they are: NaN in the twin alone.
        (None, {"twin_nonfinite": 3, "blown": 0, "error": 0.0}, False),
        (None, {"nan": 1, "twin_nonfinite": 0, "blown": 1, "error": math.inf}, True),
    ],
)
def test_a_twin_that_is_not_finite_is_no_damage(error, gradient, behind):
    seen = evidence_of(error, gradient)
    assert (seen.falls_behind, seen.starts_apart) == (behind, behind)
