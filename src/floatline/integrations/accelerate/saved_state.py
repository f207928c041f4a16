"""The state of guards as a scaler's checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from floatline.guard.checkpoints.guard_state import check_number, collect_own, restore_own
from floatline.guard.guard import Guard

_GUARDS = "floatline"  # the entry that torch's scaler does not know


def collect(guards: Sequence[Guard]) -> dict[str, Any]:
    """The scale as torch's scaler saves it, and one entry with everything of the guards; plain values, CPU tensors."""
    judge = guards[0].run.judge
    return {
        "scale": float(judge.scale),
        "_growth_tracker": int(judge.good_steps),
        "_hysteresis_tracker": int(judge.overflows),
        _GUARDS: [collect_own(guard.run) for guard in guards],
    }


def without_guards(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the state that torch's scaler knows."""
    return {name: value for name, value in state.items() if name != _GUARDS}


def restore(guards: Sequence[Guard], state: Mapping[str, Any]) -> None:
    """Bring guards to where `collect` was called; a state of torch's scaler has the scale alone."""
    if _GUARDS not in state:
        if guards[0].plan.scaling is not None:
            guards[0].load_scaler(dict(state))
        return
    saved = cast("list[dict[str, Any]]", state[_GUARDS])
    check_number(len(saved), len(guards))
    for guard, own in zip(guards, saved, strict=True):
        restore_own(guard.run, own)
