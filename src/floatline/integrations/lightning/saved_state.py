"""The state of guards as a framework's checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from floatline.errors import GuardError
from floatline.guard.checkpoints.guard_state import check_number, collect_own, restore_own
from floatline.guard.guard import Guard
from floatline.integrations.lightning.schedules import CalledSchedules
from floatline.plans import Plan

SCHEMA = 1


def collect(guard: Guard) -> dict[str, Any]:
    """Everything of a guard that the framework does not save itself; plain values and CPU tensors."""
    return {**collect_own(guard.run), "schedules": cast(CalledSchedules, guard.run.schedules).debts()}


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


def restore(guard: Guard, state: dict[str, Any]) -> None:
    """Bring a guard to where `collect` was called."""
    run = guard.run
    plan = Plan(**state["plan"])
    if plan.compute == run.plan.compute:
        run.take_plan(run.plan, state["islands"])  # those that were made on the way, too
    restore_own(run, state)
    cast(CalledSchedules, run.schedules).load_debts(state["schedules"])


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
    scaling, judge = guard.plan.scaling, guard.run.judge
    if scaling is None:
        return None
    return {
        "scale": float(judge.scale),
        "growth_factor": scaling.growth_factor,
        "backoff_factor": scaling.backoff_factor,
        "growth_interval": scaling.growth_interval,
        "_growth_tracker": int(judge.good_steps),
    }
