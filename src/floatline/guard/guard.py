"""Guard: a training step that cannot damage the weights, says what happened, and waits for nothing."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from floatline.base.interrupts import Undisturbed
from floatline.base.json_values import plain_json
from floatline.errors import GuardError, LedgerError
from floatline.guard.admission import admit, check_clip, choose_clipping
from floatline.guard.captured_passes import CapturedPasses, check_captures
from floatline.guard.checkpoints import guard_state, rank_files
from floatline.guard.diary import Diary
from floatline.guard.failures import FailureWatch, OnFailure
from floatline.guard.kernels import counter_for, fused_for, judge_for
from floatline.guard.outcome import Outcome
from floatline.guard.policy import Policy, resolve_policy
from floatline.guard.recovery.recovery import Recovery
from floatline.guard.recovery.snapshots import SnapshotRing
from floatline.guard.responses import Responses
from floatline.guard.run import GuardedRun, Run
from floatline.guard.schedules import Schedules, check_rates
from floatline.guard.step.buffers import Buffers
from floatline.guard.step.judge import Judge, Verdict
from floatline.guard.step.layers import Layers, Lost
from floatline.guard.step.samples import Samples
from floatline.guard.step.stepping import Stepper, norm_of
from floatline.optim.survey import Decision, Survey
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.applied_plan import AppliedPlan
from floatline.precision.live_holdings import describe_start
from floatline.precision.micro_batches import (
    Loss,
    LossSum,
    autocast_of,
    run_micro_batches,
    synced_at_the_end,
    take_loss,
)
from floatline.precision.random_state import RandomState
from floatline.precision.wrappers import drop_gradients, unwrap


class Guard(GuardedRun):
    """Puts a training step under guard: scaled, checked, clipped, applied wholly or not at all, and recorded.

    Numerics:
        What happens to a step is decided on the device (see `judge`), from the same numbers on every process. A
        skipped step leaves weights, states and averages bit for bit. The loss is recorded as it was.
        With floatline's optimizers and torch's fused ones no step reads a number on the host; what was decided is
        read `policy.read_after` steps later.

    Args:
        model: The model; plain, compiled, or wrapped by DDP or FSDP2.
        optimizer: Trains the model's parameters.
        plan: Precision, scaling and clipping: a name, a YAML file or a Plan.
        clip_norm: Largest norm of the unscaled gradients. None takes the plan's clipping, where it has one; math.inf
            clips none.
        clip_value: Largest magnitude of an element of the unscaled gradients, instead of a norm.
        norm_type: Which norm `clip_norm` bounds; 2 costs nothing extra.
        policy: When to skip, go back and stop: a Policy, a preset's name, or None for the plan's.
        folder: Run folder of the ledger, and of the state that is saved before a stop. None keeps the account in
            memory only.
        resume: Go on with the ledger that the folder holds.
        canary: Gives the loss of a fixed batch, to tell bad data from bad weights. None takes the first batch that
            `step` sees.
        loss_fn: The loss function, for a plan that keeps `loss` in FP32 or rewrites in it; call `guard.loss_fn`.
        due_every: Every N-th outcome is `due`.
        record_layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        steps: Steps that the run will have, for the ledger's header: `floatline watch` tells the time to go.
        on_failure: Called with each step made by `step` that failed for another reason than a search for the scale,
            such as a `Diagnoser`; what it returns goes to the ledger. The last few batches are kept for it.
        process_group: Processes that train together; None is the default group.
        graph: Replay forward and backward of `step` as CUDA graphs, one for each shape of batches. What `compute_loss`
            reads from Python in each step must then be in its batches.

    Attributes:
        manifest: What weights, states and buffers are held in at the start, as one line; it is in the ledger's header.
        lost: Gradients that FP16 lost to zero, in the last step in which they were counted.
        on_outcome: Called with each outcome once its numbers are on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        plan: Plan | str | PathLike[str] = "fp16-mixed",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        norm_type: float = 2.0,
        policy: Policy | str | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        canary: Callable[[], Loss] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        due_every: int = 50,
        record_layers_every: int = 0,
        steps: int | None = None,
        on_failure: OnFailure | None = None,
        process_group: dist.ProcessGroup | None = None,
        graph: bool = False,
    ) -> None:
        plan = resolve_plan(plan)
        policy = resolve_policy(policy, plan_name=plan.name)
        check_clip(clip_norm, clip_value, norm_type)
        device = admit(model, optimizer, plan)
        if graph:
            check_captures(device, model, policy, group=process_group)
        self.clip_norm, self.clip_value, self.norm_type = choose_clipping(plan, clip_norm, clip_value, norm_type)
        self._late = policy.read_after if device.type == "cuda" else 0
        self.manifest = describe_start(unwrap(model), optimizer, plan)
        self.run = Run(
            model=model,
            optimizer=optimizer,
            device=device,
            plan=plan,
            policy=policy,
            judge=Judge(device, scaling=plan.scaling, policy=policy, group=process_group, launch=judge_for(device)),
            schedules=Schedules(optimizer, late=self._late > 0),
            applied=AppliedPlan(unwrap(model), plan, loss_fn=loss_fn),
            diary=Diary(folder, resume=resume, metadata=_metadata(plan, steps, self.manifest), group=process_group),
            recovery=Recovery(
                policy,
                floor=None if plan.scaling is None else plan.scaling.floor,
                can_probe=canary is not None,
                can_roll_back=policy.snapshot_gib > 0,
            ),
            ring=SnapshotRing(policy=policy, process_group=process_group),
            samples=Samples(model, device) if policy.skip_outliers else None,
        )
        self._captured = CapturedPasses(self.run, _run_plainly) if graph else None
        self._stepper = Stepper(optimizer, clip_value=self.clip_value)
        self._buffers = Buffers(model, fused_for=fused_for)
        self._layers = Layers(
            unwrap(model),
            optimizer,
            every=record_layers_every,
            policy=policy,
            plan=plan,
            count=counter_for(optimizer.param_groups[0]["params"][0].device),
            group=process_group,
        )
        self._rescue = Responses(self.run, canary=canary)
        self._failures = None if on_failure is None else FailureWatch(self.run, on_failure)
        self._due_every = max(1, due_every)
        self._sum = LossSum(group=process_group, looks=True)
        self._pending: deque[Outcome] = deque()
        self.lost: Lost | None = None
        self.on_outcome: Callable[[Outcome], None] | None = None

    @contextlib.contextmanager
    def autocast(self) -> Generator[None]:
        """The context of the forward pass: the plan's compute dtype, or nothing where weights have it already.

        A step begins with it, where gradients are on; what raises in it leaves nothing of the step behind.
        """
        trains = torch.is_grad_enabled() and self.run.model.training
        with self._undone_if_it_raises() if trains else contextlib.nullcontext():
            if trains:
                self._buffers.keep()
            with autocast_of(self.run.plan, self.run.device):
                yield

    @contextlib.contextmanager
    def _undone_if_it_raises(self) -> Generator[None]:
        """What raises before a step is made leaves nothing of it: half a gradient must not be added to the next."""
        attempts = self.run.attempts
        try:
            yield
        except BaseException:
            if self.run.attempts == attempts:
                self._abandon()
            raise

    def step(
        self, compute_loss: Callable[[Any], Loss], *micro_batches: Any, skip: bool | Tensor | None = None
    ) -> Outcome:
        """One whole step: forward and backward of every micro-batch, decision, update.

        Args:
            compute_loss: Gives the loss of a batch, averaged over it: a tensor with one number; or (loss, weight),
                where micro-batches hold different numbers of items. It may be called again, with the same random
                numbers, so it must not count or consume anything itself.
            micro_batches: What `compute_loss` is called with, one after the other.
            skip: True: compute, record, and leave everything as it is.
        """
        if not micro_batches:
            raise GuardError("step() was given no batch. Call guard.step(compute_loss, batch).")
        if self._sum.num:
            raise GuardError("step() was called between backward() and update(). Call update() first.")
        self._rescue.remember(compute_loss, micro_batches[0])
        self._stepper.drop_gradients()  # another guard's step may have left some
        for retries in range(self.run.policy.retry_overflow + 1):
            before = RandomState.now() if self.run.policy.retry_overflow else None
            if self._failures is not None:
                self._failures.keep(self.run.attempts + 1, compute_loss, micro_batches)
            self._buffers.keep(again=True)
            with self._undone_if_it_raises():
                total = self._run(compute_loss, micro_batches)
                outcome = self._finish(total, skip, retries=retries)
            if before is None or retries == self.run.policy.retry_overflow or outcome.reason != "overflow":
                return outcome
            before.restore()
        raise AssertionError  # the loop always returns

    def _run(self, compute_loss: Callable[[Any], Loss], batches: tuple[Any, ...]) -> LossSum:
        if self._captured is not None:
            return self._captured(compute_loss, batches)
        return _run_plainly(self.run, compute_loss, batches)

    def _abandon(self) -> None:
        """Leave nothing of a step that was not made."""
        with Undisturbed():
            self._stepper.drop_gradients()
            drop_gradients(self.run.model)
            self._buffers.undo()
            self._sum = LossSum(group=self.run.judge.group, looks=self._sum.looks)
            if self.run.samples is not None:
                self.run.samples.drop()

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, last: bool = True) -> None:
        """Send a loss backward, scaled; call it once for each micro-batch, then `update`.

        Args:
            loss: The loss of a micro-batch, averaged over it.
            weight: How many items it was averaged over, where micro-batches differ.
            last: False: more micro-batches follow, and FSDP2 may wait with exchanging gradients. (For DDP, put
                forward and backward of all but the last into `model.no_sync()`.)
        """
        with self._undone_if_it_raises():
            if not self._sum.num:
                self._stepper.drop_gradients()  # another guard's step may have left some
            loss, _ = take_loss(loss, "The loss")
            sync = hasattr(self.run.model, "set_requires_gradient_sync")
            with synced_at_the_end(self.run.model, last) if sync else contextlib.nullcontext():
                (self._sum.add(loss, weight).to(torch.float32) * self.run.judge.scale.to(loss.device)).backward()

    def update(self, *, skip: bool | Tensor | None = None) -> Outcome:
        """Decide on the gradients of all `backward` calls since the last update; make the step or leave it.

        Gradients are set to None afterwards.

        Args:
            skip: True: leave everything as it is.
        """
        with self._undone_if_it_raises():
            total, self._sum = self._sum, LossSum(group=self.run.judge.group)
            return self._finish(total, skip)

    def take_step(self, total: LossSum, *, skip: bool | Tensor | None = None) -> Outcome:
        """Decide on gradients that the caller made: for a framework that runs forward and backward by itself.

        The losses went backward times `guard.scale`. Gradients stay where they are.

        Args:
            total: The losses, and what the gradients are divided by.
            skip: True: leave everything as it is.
        """
        with self._undone_if_it_raises():
            return self._finish(total, skip, keep_gradients=True)

    def remember(self, compute_loss: Callable[[Any], Loss], batches: Sequence[Any]) -> None:
        """Keep what the next `take_step` is made of, for the canary and for `on_failure`.

        Args:
            compute_loss: Gives the loss of a batch; it may be called again.
            batches: The micro-batches; more may be added until the step is taken.
        """
        self._rescue.remember(compute_loss, batches[0])
        if self._failures is not None:
            self._failures.keep(self.run.attempts + 1, compute_loss, cast("tuple[Any, ...]", batches))

    def clip_by(self, *, norm: float = math.inf, value: float | None = None, norm_type: float = 2.0) -> None:
        """Clip by another norm, or by value, from the next step on."""
        check_clip(None if value is not None else norm, value, norm_type)
        self.clip_norm, self.clip_value, self.norm_type = norm, value, norm_type
        self._stepper.clip_value = value

    def _finish(
        self, total: LossSum, skip: bool | Tensor | None, *, retries: int = 0, keep_gradients: bool = False
    ) -> Outcome:
        with Undisturbed():
            outcome = self._make(total, skip, retries=retries, keep_gradients=keep_gradients)
            self.run.schedules.attempt()  # may raise: a schedule has an end
        if total.num > 1 and total.divisor == total.num:
            self.note(
                f"the loss of a micro-batch is divided by {total.num}, and the guard averages over the {total.num} as "
                f"well: gradients are {total.num} times smaller than in a loop that divides once. Return the mean loss"
            )
        self._learn(self._late)
        self._rescue.snapshot_if_due()
        self.run.diary.check()  # last: on several processes the others have made the whole step
        return outcome

    def _make(self, total: LossSum, skip: bool | Tensor | None, *, retries: int, keep_gradients: bool) -> Outcome:
        """Judge and update: a step that raises counts where it has moved weights, and only there."""
        loss = total.mean
        before = self.run.attempts, self.run.batch
        self.run.attempts += 1
        if self.run.batch is not None and not retries:
            self.run.batch += 1
        divisor = total.weight
        found: list[Verdict] = []
        names = self._layers.due(self.run.attempts)
        records: list[tuple[tuple[str, ...], Tensor]] = []
        unit = self.run.judge.scale * divisor  # before the judge moves the scale

        def judge(survey: Survey) -> Decision:
            verdict = self.run.judge.judge(
                loss,
                survey,
                clip_norm=self.clip_norm,
                divisor=divisor,
                norm=norm_of(self.run.optimizer, self.norm_type) if math.isfinite(self.clip_norm) else None,
                skip=skip,
                samples=self.run.samples,
            )
            found.append(verdict)
            if verdict.divisor is not None:
                torch.mul(verdict.report[1], verdict.divisor, out=unit)  # what the processes agreed on
            if names:
                records.append(self._layers.record(survey, unit))
            return verdict.decision

        lr = self.run.optimizer.param_groups[0]["lr"]
        marks = self._stepper.marks()
        try:
            check_rates(self.run.optimizer)
            self._layers.count(self.run.attempts)
            self._stepper.step(judge, unit)
        except BaseException:
            if not found or self._stepper.marks() == marks:  # no weight has moved: there was no step
                self.run.attempts, self.run.batch = before
                raise
            self._note(found[0], records, total, lr, retries, keep_gradients=False)
            raise
        return self._note(found[0], records, total, lr, retries, keep_gradients=keep_gradients)

    def _note(
        self,
        verdict: Verdict,
        records: list[tuple[tuple[str, ...], Tensor]],
        total: LossSum,
        lr: float | Tensor,
        retries: int,
        *,
        keep_gradients: bool,
    ) -> Outcome:
        """A step was made or left out: that is in the account, whatever comes now."""
        outcome = Outcome(
            verdict.report,
            attempt=self.run.attempts,
            due=self.run.attempts % self._due_every == 0,
            epoch=self.run.epoch,
            batch=self.run.batch,
            micro_batches=total.num,
            lr=None if isinstance(lr, Tensor) else float(lr),
            layers=records[0] if records else None,
            retries=retries,
            votes=verdict.votes,
        )
        self._pending.append(outcome)
        if not keep_gradients:
            self._stepper.drop_gradients()
        self._buffers.settle(verdict.decision.applied)
        if self.run.average is not None:
            self.run.average.update(verdict.decision.applied)
        return outcome

    def _learn(self, leave: int) -> None:
        """Read what became of earlier steps, except the last `leave`, and act on it."""
        while len(self._pending) > leave:
            outcome = self._pending[0]
            applied = outcome.applied  # waits for the device
            with Undisturbed():
                self._pending.popleft()
                lost = self._layers.lost(outcome.attempt)
                self.lost = lost or self.lost
                try:
                    self.run.diary.write(outcome, lost=None if lost is None else lost.share)  # may raise: a listener
                finally:
                    self.run.schedules.learn(applied=applied)  # may raise: a schedule has an end
            if self.on_outcome is not None:
                self.on_outcome(outcome)
            if self._failures is not None:
                self._failures.look_at(outcome, self._pending)
            self._rescue.act_on(outcome, lost=lost)

    def drain(self) -> None:
        """Read everything that is outstanding; waits for the device."""
        self._learn(0)
        self.run.diary.check()

    def replay(self, compute_loss: Callable[[Any], Loss], batch: Any, *, precision: str | None = None) -> Tensor:
        """The loss of a batch as it would be now, without a trace: weights, gradients and random numbers stay.

        Args:
            compute_loss: Gives the loss.
            batch: What it is called with.
            precision: "fp32" computes in float32; None as the plan says.
        """
        return self._rescue.replay(lambda: compute_loss(batch), precision=precision)

    def summary(self) -> str:
        """What happened, in five lines, and one for each diagnosis; waits for the device."""
        self.drain()
        return "\n".join([self.run.diary.accounts.summary(), *self.run.diagnoses])

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything needed to go on as if nothing had happened: tensors, and what JSON can hold."""
        self.drain()
        return guard_state.collect(self.run)

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, with the same model, optimizer and schedulers."""
        self._pending.clear()
        self._buffers.forget()
        self.run.optimizer.zero_grad(set_to_none=True)
        guard_state.restore(self.run, tensors, state)

    def save(self, folder: str | Path, *, extra: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint under the folder, atomically; every process of a run must call it.

        Args:
            folder: Where checkpoints of this run lie.
            extra: What the caller needs to go on, such as the place in the data; JSON.
        """
        self._learn(0)
        tensors, state = guard_state.collect(self.run)
        failure = None
        try:
            self.run.diary.flush()  # the ledger lacks no step that a checkpoint holds
        except LedgerError as error:
            failure = error  # the checkpoint is worth more, and the other processes wait for this one in it
        path = rank_files.save(self.run, Path(folder), tensors, {**state, "extra": extra or {}})
        if failure is not None:
            raise failure
        return path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, or from the newest one under a folder; gives back `extra`.

        Args:
            path: A checkpoint, or the folder of several.
        """
        tensors, state = rank_files.load(self.run, Path(path))
        self.load_state_dict(tensors, state)
        return cast("dict[str, Any]", state.get("extra", {}))

    def close(self) -> None:
        """Read what is outstanding, and close the ledger."""
        try:
            self.drain()
        finally:
            self.run.applied.remove()
            self._buffers.remove()
            if self.run.samples is not None:
                self.run.samples.remove()
            self.run.diary.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_plainly(run: Run, compute_loss: Callable[[Any], Loss], batches: tuple[Any, ...]) -> LossSum:
    """Forward and backward of every micro-batch."""
    return run_micro_batches(
        compute_loss,
        batches,
        model=run.model,
        autocast=lambda: autocast_of(run.plan, run.device),
        scale=run.judge.scale,
        group=run.judge.group,
        looks=not run.attempts,
    )


def _metadata(plan: Plan, steps: int | None, manifest: str) -> dict[str, Any]:
    """For the ledger's header; a clip by the largest element has the norm type inf, which JSON holds as text."""
    plain = plain_json(plan.model_dump(mode="json"))
    return {"plan": plain, "manifest": manifest} | ({} if steps is None else {"steps": steps})
