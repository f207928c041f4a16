"""The state of guards as a framework's checkpoint holds it, and the scale as torch's GradScaler saves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.checkpoints.guard_state import check_number, collect_own, restore_own
from floatline.guard.guard import Guard
from floatline.plans import Plan

SCHEMA = 1
_GUARDS = "floatline"  # the entry that torch's scaler does not know


def collect_with_scaler(guards: Sequence[Guard]) -> dict[str, Any]:
    """The scale as torch's scaler saves it, and one entry with everything of the guards; plain values, CPU tensors."""
    scale, good_steps, overflows = guards[0].shared_scale
    return {
        "scale": float(scale),
        "_growth_tracker": int(good_steps),
        "_hysteresis_tracker": int(overflows),
        _GUARDS: [collect_own(guard.run) for guard in guards],
    }


def without_guards(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the state that torch's scaler knows."""
    return {name: value for name, value in state.items() if name != _GUARDS}


def restore_with_scaler(guards: Sequence[Guard], state: Mapping[str, Any]) -> None:
    """Bring guards to where `collect_with_scaler` was called; a state of torch's scaler has the scale alone."""
    if _GUARDS not in state:
        if guards[0].plan.scaling is not None:
            guards[0].load_scaler(dict(state))
        return
    saved = cast("list[dict[str, Any]]", state[_GUARDS])
    check_number(len(saved), len(guards))
    for guard, own in zip(guards, saved, strict=True):
        restore_own(guard.run, own)


def check(state: Mapping[str, Any], *, num_guards: int) -> list[dict[str, Any]]:
    """What was collected of each guard; GuardError where it is that of another run.

    Args:
        state: From a checkpoint.
        num_guards: Guards that the run has; 0 where they are still to come.
    """
    if state.get("schema") != SCHEMA:
        raise GuardError(f"The guard's state has schema {state.get('schema')!r}, and this version reads {SCHEMA}.")
    saved = cast("list[dict[str, Any]]", state["guards"])
    if num_guards:
        check_number(len(saved), num_guards)
    return saved


def restore_scale(scale: Tensor, good_steps: Tensor, state: Mapping[str, Any], plan: Plan) -> None:
    """Take the scale of a torch.amp.GradScaler, within the plan's limits; nothing where the plan has none."""
    if plan.scaling is None or "scale" not in state:
        return
    value = float(state["scale"])
    if not (math.isfinite(value) and value > 0):
        raise GuardError(f"The saved scale is {value}. Load an earlier checkpoint, or start without one.")
    scale.fill_(min(max(value, plan.scaling.floor), plan.scaling.cap))
    good_steps.fill_(float(state.get("_growth_tracker", state.get("good_steps", 0))))


def scaler_state(guard: Guard) -> dict[str, Any] | None:
    """The scale as a torch.amp.GradScaler would save it; None where the loss is not scaled."""
    scaling = guard.plan.scaling
    if scaling is None:
        return None
    scale, good_steps, _ = guard.shared_scale
    return {
        "scale": float(scale),
        "growth_factor": scaling.growth_factor,
        "backoff_factor": scaling.backoff_factor,
        "growth_interval": scaling.growth_interval,
        "_growth_tracker": int(good_steps),
    }
