"""find_damage: everything that a trace alone shows of silent damage, so that a replay can be asked for it again."""

from __future__ import annotations

from floatline.diagnosis import silent
from floatline.probe.trace import Op, Trace


def find_damage(trace: Trace) -> list[tuple[str, Op]]:
    """Cause and operation of all that vanishes, stands still, collides or cancels."""
    found: list[tuple[str, Op]] = []
    lost = silent.first_lost(trace) if silent.lost_gradients(trace) else None
    if lost is not None:
        found.append(("gradient-underflow", lost))
    for op, _ in [*silent.stuck_states(trace), *silent.stuck_sums(trace, ruinous=False)]:
        found.append(("accumulator-stagnation", op))
    found += [("accumulator-stagnation", op) for op, _ in silent.stuck_scatters(trace, ruinous=False)]
    found += [("integer-not-exact", op) for op, _ in silent.colliding_casts(trace)]
    found += [("cancellation", op) for op, _ in silent.cancelled(trace)]
    return found
