"""What the guard does when recovery asks for it: look at the weights, ask the canary, go back, escalate, stop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from floatline.base.texts import percent
from floatline.causes import find_cause
from floatline.errors import LedgerError
from floatline.findings import Finding, GuardStop
from floatline.guard.checkpoints import guard_state, rank_files
from floatline.guard.diary import is_first_process, say
from floatline.guard.failures import name_cause
from floatline.guard.outcome import Outcome
from floatline.guard.recovery.actions import (
    AcceptRegime,
    Action,
    Alarm,
    AskCanary,
    CheckWeights,
    Escalate,
    RaiseScale,
    Rollback,
    Stop,
    Warn,
)
from floatline.guard.recovery.recovery import SeenStep, is_sound
from floatline.guard.recovery.snapshots import Snapshot
from floatline.guard.run import Run
from floatline.guard.step.buffers import untouched
from floatline.guard.step.layers import Lost
from floatline.ledger.lines import TO_FIND
from floatline.optim.mesh import local_part, num_processes
from floatline.precision.micro_batches import Loss, autocast_of, take_loss
from floatline.precision.nonfinite import NonfinitePlace, first_nonfinite
from floatline.precision.random_state import RandomState
from floatline.precision.wrappers import unwrap

USUAL_SCALE = 2.0**16


class Responses:
    """Carries out what `Recovery` decides.

    Every decision rests on numbers that all processes share, so all of them come here in the same step.

    Args:
        run: What is guarded.
        canary: Gives the loss of a fixed batch; None takes the first batch that is remembered.
    """

    def __init__(self, run: Run, *, canary: Callable[[], Loss] | None) -> None:
        self._run = run
        self._canary = canary
        self._latest: Outcome | None = None  # the step that is acted on
        self._closure: Callable[[], Loss] | None = None  # gives the loss of the last batch
        self._norm_was_above = self._told_norm = False

    def remember(self, compute_loss: Callable[[Any], Loss], batch: Any) -> None:
        """Keep the last batch, to say where it fails, and the first as canary, where the run can go back at all."""
        self._closure = lambda: compute_loss(batch)
        if self._canary is None and self._run.policy.snapshot_gib > 0:
            self._canary = lambda: compute_loss(batch)
            self._run.recovery.can_probe = True

    def snapshot_if_due(self) -> None:
        """Take a snapshot behind the step that was just sent off; its finiteness is looked at when it is needed."""
        run = self._run
        # Before the first applied step there are no states yet; after it there are, or the optimizer keeps none.
        begun = run.optimizer.state or run.diary.accounts.run.applied
        if not run.recovery.healthy or not begun or not run.ring.due(run.attempts):
            return
        canary = None if self._canary is None else self.replay(self._canary)
        extra = run.schedules.state_dict()
        run.ring.take(
            run.attempts,
            guard_state.live_tensors(run),
            extra,
            canary,
            unchecked=guard_state.may_be_nonfinite(run),
        )

    def act_on(self, outcome: Outcome, *, lost: Lost | None = None) -> None:
        """Let recovery see what a step came to, and do what it asks for until it asks for nothing.

        Args:
            outcome: The step.
            lost: Gradients that FP16 lost in it, where they were counted.
        """
        self._latest = outcome
        numbers = outcome.numbers
        seen = SeenStep(
            attempt=outcome.attempt,
            reason=outcome.reason,
            loss=numbers["loss"],
            grad_norm=numbers["grad_norm"],
            scale=numbers["scale"],
            loss_score=numbers["loss_score"],
            norm_score=numbers["norm_score"],
        )
        self._look_at_norm(outcome.attempt, seen.grad_norm)
        todo = [*self._run.recovery.observe(seen), *self._act_on_lost(lost, numbers["scale"])]
        while todo:
            todo = [*self._do(todo[0]), *todo[1:]]

    def _look_at_norm(self, attempt: int, norm: float) -> None:
        """Tell of a norm that rose above the number the policy warns at; one that stays there is told once."""
        limit, before = self._run.policy.warn_norm_above, self._norm_was_above
        self._norm_was_above = limit < norm < math.inf
        if before or not self._norm_was_above:
            return
        words = f"large gradient norm in step {attempt:,}: {norm:.4g} is above {limit:g} (warn_norm_above)"
        self._run.diary.note("note", words)
        if not self._told_norm and is_first_process(self._run.judge.group):
            say(f"{words}; it is trained on, and further ones are in the ledger")
        self._told_norm = True

    def _act_on_lost(self, lost: Lost | None, scale: float) -> list[Action]:
        """Raise the scale where it can still grow; otherwise say that it cannot.

        A gradient that is zero everywhere is lost as a whole, or of no use. Below the scale that runs start with it is
        taken for lost: raising the scale tells, and costs nothing. Above, it is not spoken of.
        """
        policy, scaling = self._run.policy, self._run.plan.scaling
        if lost is None or scaling is None:
            return []
        silent = lost.silent_share if scale < USUAL_SCALE else 0.0
        share = lost.share + silent
        if share <= policy.underflow_warn:
            return []
        names = (*(name for name, _ in lost.layers), *(lost.silent if silent else ()))[:3]
        if share > policy.underflow_act and scale < scaling.cap:
            factor = min(16.0, USUAL_SCALE / scale) if silent > policy.underflow_act else 2.0
            return [RaiseScale(names, factor)]
        return [Warn(f"{percent(share, 1)} of gradient elements are lost to zero, most in {', '.join(names)}")]

    def _do(self, action: Action) -> list[Action]:
        run = self._run
        match action:
            case CheckWeights():
                return list(run.recovery.weights_checked(self.weights_are_finite()))
            case AskCanary():
                snapshot = run.ring.newest_before(action.before)
                reference = None if snapshot is None else snapshot.canary
                return list(run.recovery.canary_answered(self._ask_canary(), reference))
            case Rollback():
                return self._roll_back(action)
            case AcceptRegime():
                run.judge.forget()
                run.diary.note("regime-change", "the new level is accepted as normal: the weights are sound")
            case Escalate():
                fails = run.plan.compute == "fp32" or self._fails_in_fp32(action.reference)
                if fails and run.ring.newest() is not None:
                    # Weights that fail in FP32 where they gave a good number before are as bad as NaN: a flipped bit.
                    return list(run.recovery.weights_checked(False))
                self._escalate(action.why)
            case RaiseScale():
                run.judge.set_scale(float(run.judge.scale) * action.factor)
                run.judge.forget_norms()  # gradients that come back raise the norm
                message = f"raised: gradients are lost to zero in {', '.join(action.layers)}"
                run.diary.note("scale-change", message, scale=float(run.judge.scale))
            case Warn():
                run.diary.note("note", action.message)
            case Alarm():
                self._raise_alarm(action)
            case Stop():
                self._stop(action)
        return []

    def _raise_alarm(self, action: Alarm) -> None:
        """Say that many steps in a row failed, where that begins, and what to run."""
        run, outcome = self._run, self._latest
        ranks = () if outcome is None else outcome.ranks
        words = f"{action.num} steps in a row failed, since step {action.since:,}: {action.reason}"
        words += f", rank {', '.join(map(str, ranks))}" if ranks else ""
        place = self._find_place() if action.reason == "forward-nonfinite" else None
        words += f"; first in {place}" if place is not None else ""
        named = name_cause(run.diagnoses)
        words += f"; {named}" if named else f"{TO_FIND}{run.diary.diagnosed_by}"
        run.diary.note("note", words)
        if is_first_process(run.judge.group):
            say(words)

    def _find_place(self) -> NonfinitePlace | None:
        """Where the last batch fails; None where it does not, or cannot be run again."""
        closure = self._closure
        if closure is None:
            return None
        with contextlib.suppress(Exception):  # a word less, and the run goes on
            return first_nonfinite(unwrap(self._run.model), lambda: self.replay(closure))
        return None

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """Whether every trained weight, on every process, is finite; waits for the device."""
        params = [p for group in self._run.optimizer.param_groups for p in group["params"]]
        good = torch.stack([local_part(p.detach()).isfinite().all() for p in params]).all()
        return not self._any(~good)

    def _any(self, flag: Tensor) -> bool:
        """Whether the flag is set on any process."""
        if num_processes(self._run.judge.group) > 1:
            found = flag.to(torch.float32)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._run.judge.group)
            return bool(found)
        return bool(flag)

    def _ask_canary(self) -> float:
        """Mean of the canary's loss over the processes; NaN where there is no canary."""
        if self._canary is None:
            return math.nan
        return self._mean(self.replay(self._canary))

    def _mean(self, loss: Tensor) -> float:
        """The mean over the processes."""
        world, loss = num_processes(self._run.judge.group), loss.clone()
        if world > 1:
            dist.all_reduce(loss, group=self._run.judge.group)
        return float(loss) / world

    def replay(self, closure: Callable[[], Loss], *, precision: str | None = None) -> Tensor:
        """The loss of a closure now, in evaluation mode, with random numbers, modes and buffers put back afterwards."""
        run = self._run
        modes = [(module, module.training) for module in run.model.modules()]
        context = (
            autocast_of(run.plan, run.device) if precision is None else torch.autocast(run.device.type, enabled=False)
        )
        randomness = RandomState.now()
        run.model.eval()
        try:
            # With gradients on, so that take_loss can tell a loss from a constant; nothing goes backward.
            with untouched(run.model), context:
                loss, _ = take_loss(closure(), "The value of the canary")
            return loss.detach().to(torch.float32)
        finally:
            randomness.restore()
            for module, training in modes:
                module.training = training

    def _roll_back(self, action: Rollback) -> list[Action]:
        run = self._run
        snapshot = run.ring.newest_before(action.before)
        if snapshot is None:
            return list(run.recovery.no_snapshot())
        self._restore(snapshot)
        run.recovery.rolled_back(run.attempts)
        run.diary.note(
            "rollback",
            f"weights, optimizer and scale are those of step {snapshot.attempt:,}; data and random numbers go on",
            to=snapshot.attempt,
            number=action.number,
        )
        if action.cut_lr:
            run.schedules.cut(run.policy.lr_cut, run.policy.lr_cut_steps)
            run.diary.note(
                "lr-cut", f"learning rates x {run.policy.lr_cut:g} for {run.policy.lr_cut_steps} applied steps"
            )
        if action.escalate:
            self._escalate(f"rollback {action.number + 1}")
        return []

    def _restore(self, snapshot: Snapshot) -> None:
        run = self._run
        guard_state.reshape_buffers(run, snapshot.shapes)
        run.ring.restore(snapshot, guard_state.live_tensors(run))
        run.schedules.load_state_dict(snapshot.extra)
        run.ring.discard_after(snapshot.attempt)

    def _escalate(self, why: str) -> None:
        """Raise precision: first the block that makes non-finite values, then the whole model."""
        run = self._run
        if run.plan.compute == "fp32" or "" in run.islands.names or self._fails_in_fp32():
            self._stop(Stop("", f"{why}, in FP32 as well. Precision is not the cause: look at data and model."))
            return
        canary = self._canary
        place = None if canary is None else first_nonfinite(unwrap(run.model), lambda: self.replay(canary))
        names: list[str] = [name for name, _ in unwrap(run.model).named_modules()]  # pyright: ignore[reportUnknownVariableType]
        own = names.index(place.module) if place is not None and place.origin == "module" else 0
        # The processes may have found different ones, or none, which is 0: the last is taken by all.
        words = "" if place is None else f" ({place})"
        largest, words = self._largest(own * 2 + bool(place and place.is_output), words)
        found, is_output = divmod(largest, 2)
        if found and names[found] not in run.islands.names:
            run.islands.add(names[found], outputs="fp32" if is_output else None)
            run.diary.note("escalation", f"{why}: {names[found]} computes in FP32 from here on{words}")
            return
        self._raise_precision(why)

    def _fails_in_fp32(self, reference: float | None = None) -> bool:
        """Whether the canary is non-finite on some process with FP32 computation, where that can be tried.

        Args:
            reference: Its loss with the snapshot's weights; one far above that is a failure, too.
        """
        run = self._run
        if self._canary is None or run.plan.compute == run.plan.weights:
            return False
        loss = self.replay(self._canary, precision="fp32")
        if self._any(~loss.isfinite()):
            return True
        if reference is None or not math.isfinite(reference):
            return False
        return not is_sound(self._mean(loss), reference, tolerance=run.policy.canary_tolerance)

    def _raise_precision(self, why: str) -> None:
        """Compute in BF16 where it has FP16's speed, else in FP32; weights keep their dtypes."""
        run = self._run
        plan = run.plan
        if plan.compute == plan.weights:
            run.take_plan(plan, {"": None})
            run.diary.note("escalation", f"{why}: the whole model computes in FP32 from here on")
            return
        native = run.device.type == "cuda" and torch.cuda.get_device_capability(run.device) >= (8, 0)
        compute = "bf16" if plan.compute == "fp16" and native else "fp32"
        reasons = {**plan.reasons, "compute": f"Raised from {plan.compute} during the run: {why}."}
        changed = {"compute": compute, "scaling": None, "name": f"{plan.name}+{compute}", "reasons": reasons}
        run.take_plan(plan.model_copy(update=changed), {})
        run.diary.note("escalation", f"{why}: the model computes in {compute.upper()} from here on")

    def _largest(self, number: int, words: str) -> tuple[int, str]:
        """The largest number of all processes, with its words: their accounts stay the same."""
        world = num_processes(self._run.judge.group)
        if world == 1:
            return number, words
        found: list[Any] = [None] * world
        dist.all_gather_object(found, (number, words), group=self._run.judge.group)
        return max(found)

    def _stop(self, action: Stop) -> None:
        """Save the last good state and the ledger, then end the run."""
        run = self._run
        outcome = self._latest
        place = f" at step {run.attempts if outcome is None else outcome.attempt:,}"
        if outcome is not None and outcome.epoch is not None:
            place += f" (epoch {outcome.epoch}, batch {outcome.batch})"
        kept = ""
        if not self.weights_are_finite():
            snapshot = run.ring.newest()
            if snapshot is not None:
                self._restore(snapshot)
                kept = f" Saved: the weights of step {snapshot.attempt:,}, the last sound ones."
            else:
                kept = " Nothing saved: the weights are not finite, and there is no snapshot."
        if run.diary.folder is not None and not kept.startswith(" Nothing"):
            tensors, state = guard_state.collect(run)
            path = rank_files.save(run, run.diary.folder / "stopped", tensors, {**state, "extra": {}})
            kept += f" State: {path}."
        named = name_cause(run.diagnoses)
        advice = f"The {named.rstrip('.')}." if named else action.advice
        message = f"Stopped{place}: {action.message}{' ' * bool(advice)}{advice}{kept}"
        run.diary.note("stop", message)
        try:
            run.diary.flush()
        except LedgerError as error:
            message = f"{message} {error}"  # the stop must be heard, on this process as on the others
        finding = None
        if action.cause_id:
            cause = find_cause(action.cause_id)
            finding = Finding(cause, seen=action.message, fix=cause.advice)
        raise GuardStop(message, finding=finding)
