"""The state of guards as a scaler's checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from floatline.errors import GuardError
from floatline.guard.guard import Guard
from floatline.ledger.account import Accounts
from floatline.plan import Plan

_GUARDS = "floatline"  # the entry that torch's scaler does not know


def collect(guards: Sequence[Guard]) -> dict[str, Any]:
    """The scale as torch's scaler saves it, and one entry with everything of the guards; plain values, CPU tensors."""
    judge = guards[0].run.judge
    return {
        "scale": float(judge.scale),
        "_growth_tracker": int(judge.good_steps),
        "_hysteresis_tracker": int(judge.overflows),
        _GUARDS: [_collect(guard) for guard in guards],
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
    if len(saved) != len(guards):
        raise GuardError(
            f"The checkpoint has the state of {len(saved)} optimizers, and this run has {len(guards)}. "
            "Resume with the same optimizers."
        )
    for guard, own in zip(guards, saved, strict=True):
        _restore(guard, own)


def _collect(guard: Guard) -> dict[str, Any]:
    run = guard.run
    return {
        "judge": {name: tensor.detach().to("cpu", copy=True) for name, tensor in run.judge.state().items()},
        "recovery": run.recovery.state_dict(),
        "accounts": run.diary.accounts.as_json(),
        "plan": run.plan.model_dump(mode="json"),
        "islands": dict(run.islands.outputs),
        "attempts": run.attempts,
        "epoch": run.epoch,
        "batch": run.batch,
    }


def _restore(guard: Guard, state: dict[str, Any]) -> None:
    run = guard.run
    plan = Plan(**state["plan"])
    if plan.name.startswith(f"{run.plan.name}+"):
        run.take_plan(plan, state["islands"])  # precision that was raised on the way stays raised
    judge = dict(state["judge"])
    if (plan.scaling is None) != (run.plan.scaling is None):
        # A run that goes on in another precision keeps its windows; the other one's scale says nothing to it.
        judge |= {name: run.judge.state()[name] for name in ("scale", "good_steps", "overflows")}
    run.judge.load_state(judge)
    run.recovery.load_state_dict(state["recovery"])
    run.diary.accounts = Accounts.from_json(state["accounts"])
    run.attempts, run.epoch, run.batch = state["attempts"], state["epoch"], state["batch"]
