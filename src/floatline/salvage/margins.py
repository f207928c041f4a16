"""Margins of a rescue's validation: of the metric, or of what FP32 learnt where the metric goes to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

from floatline.validate.pairs import ArmRun
from floatline.validate.terms import MARGINS, Scale

SHORT = (0.05, 0.10)
# A margin may be so much of what FP32 learnt, where that is more than the same margin of the metric.
PART_OF_GAIN = 0.2


@dataclass(frozen=True)
class Margins:
    """How near to FP32 a plan must come.

    Args:
        scale: As `validate` takes it.
        values: PASS up to the first, FAIL from the second on.
        words: The first one for people.
        note: Why it is not the usual one; '' where it is.
    """

    scale: Scale
    values: tuple[float, float]
    words: str
    note: str = ""


def usual_margins(*, prove: bool) -> Margins:
    """Shares of the metric itself: 1 and 2 % in a proof, 5 and 10 % in the short form."""
    first, second = MARGINS if prove else SHORT
    return Margins("log", (first, second), f"{100 * first:g} %")


def settle_margins(pilot: ArmRun, *, prove: bool) -> Margins:
    """The margins for a metric that is better when lower, from one FP32 run alone, before any plan is looked at.

    A share of a loss that goes to zero is less than FP32 differs from itself, and no comparison can be made. Then the
    margins are a share of what FP32 learnt, a fifth of the usual one. Both are the same where FP32 ends at a sixth of
    its start, and the larger one is taken.

    Numerics:
        The usual margin m of the metric at the end, m * end, against m / 5 * (start - end). Checked by
        tests/rescue/test_margins.py.

    Args:
        pilot: FP32, one seed; `start` and `metric` are read.
        prove: Whether the margins are those of a proof.
    """
    usual = usual_margins(prove=prove)
    start, end = pilot.start, pilot.metric
    if pilot.error or start is None or not math.isfinite(start) or not math.isfinite(end) or end >= start:
        return usual
    gain = start - end
    share = PART_OF_GAIN * usual.values[0]
    if usual.values[0] * end >= share * gain:
        return usual
    first, second = (PART_OF_GAIN * value * gain for value in usual.values)
    return Margins(
        "difference",
        (first, second),
        f"{100 * share:g} % of what FP32 learnt",
        f"In FP32 the metric goes from {start:.4g} to {end:.4g}. {usual.words} of so little is no measure: the margins "
        f"are {100 * share:g} and {200 * share:g} % of the {gain:.4g} that FP32 learnt.",
    )
