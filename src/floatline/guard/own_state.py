"""What is the guard's own in a run whose weights and optimizer a framework saves: plain values and CPU tensors."""

from __future__ import annotations

from typing import Any

from floatline.errors import GuardError
from floatline.guard.run import Run
from floatline.ledger.account import Accounts
from floatline.plan import Plan

# What belongs to the loss scale; a run without one has nothing to say about it.
_OF_THE_SCALE = ("scale", "good_steps", "overflows")


def collect_own(run: Run) -> dict[str, Any]:
    """Windows, scale, counters, accounts, and the precision that was raised on the way."""
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


def restore_own(run: Run, state: dict[str, Any]) -> None:
    """Bring a run to where `collect_own` was called. A run that goes on in another precision keeps its own scale."""
    plan = Plan(**state["plan"])
    if plan.name.startswith(f"{run.plan.name}+"):
        run.take_plan(plan, state["islands"])  # precision that was raised on the way stays raised
    judge = dict(state["judge"])
    if (plan.scaling is None) != (run.plan.scaling is None):
        judge |= {name: run.judge.state()[name] for name in _OF_THE_SCALE}
    run.judge.load_state(judge)
    run.recovery.load_state_dict(state["recovery"])
    run.diary.accounts = Accounts.from_json(state["accounts"])
    run.attempts, run.epoch, run.batch = int(state["attempts"]), state["epoch"], state["batch"]


def check_number(saved: int, here: int) -> None:
    """Refuse the state of another number of guards."""
    if saved != here:
        raise GuardError(
            f"The checkpoint has the state of {saved} optimizers, and this run has {here}. "
            "Resume with the same optimizers."
        )
