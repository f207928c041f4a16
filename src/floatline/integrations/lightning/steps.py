"""GuardedSteps: what the plugins for Trainer and Fabric share: scaling, arithmetic, steps and state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.guard.checkpoints.guard_state import collect_own, restore_own
from floatline.guard.diary import is_first_process, say
from floatline.guard.failures import OnFailure
from floatline.guard.guard import Guard
from floatline.guard.outcome import Outcome
from floatline.guard.policy import Policy, resolve_policy
from floatline.guard.step.unscaling import widen_fp16
from floatline.integrations import saved_state
from floatline.integrations.half_arithmetic import Arithmetic
from floatline.integrations.lightning.metrics import Metrics
from floatline.integrations.lightning.optimizers import CalledSchedules, multiply_gradients
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.micro_batches import LossSum


@dataclass
class Watching:
    """What a run is watched with.

    Args:
        policy: When to skip, go back and stop; None is the plan's.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        on_failure: Called with each failed step.
        steps: Steps that the run will have, where that is known; for the ledger's header.
    """

    policy: Policy | str | None = None
    folder: Path | None = None
    resume: bool = False
    layers_every: int = 0
    on_failure: OnFailure | None = None
    steps: int | None = None

    def resolve(self, plan: Plan, *, alone: bool = True) -> Policy:
        """The policy that was given, or the plan's.

        Args:
            plan: The plan.
            alone: There is one optimizer. With more than one, none goes back: it would take the weights of the others
                along, and leave their states.
        """
        policy = resolve_policy(self.policy, plan_name=plan.name)
        return policy if alone else replace(policy, snapshot_gib=0.0)


_NAMES = {("fp32", "fp16"): "16-mixed", ("fp32", "bf16"): "bf16-mixed", ("fp32", "fp32"): "32-true"}


class GuardedSteps:
    """The guarded steps of a run whose loop belongs to a framework.

    Every optimizer has a guard. The loss scale is one for all of them, because nobody knows in a backward pass which
    optimizer its gradients are for.

    Numerics:
        Losses go backward times the scale, in FP32. Several losses before a step are summed, as their gradients are;
        the mean is recorded. A scale that moved between a loss and its step, as it may with two optimizers, does no
        harm: gradients are divided by the one they were made with.

    Args:
        plan: Precision: a name, a YAML file or a Plan.
        cache_casts: Let autocast keep casted weights for the length of a forward pass.
    """

    def __init__(self, plan: Plan | str | Path, *, cache_casts: bool) -> None:
        self.plan = resolve_plan(plan)
        self.watching = Watching()
        self.guards: list[Guard] = []
        self.metrics = Metrics()
        self.on_outcome: Callable[[Outcome], None] | None = None
        self.arithmetic = Arithmetic(self.plan, cache_casts=cache_casts)
        self.scale = torch.ones((), dtype=torch.float32, device="cpu")
        self._good_steps, self._overflows = torch.zeros_like(self.scale), torch.zeros_like(self.scale)
        self._saved: list[dict[str, Any]] = []  # for guards that are still to come
        self._ended: list[dict[str, Any]] = []  # what became of the guards of the run before
        self._ended_scaler: dict[str, Any] | None = None
        self._losses: list[Tensor] = []
        self._loss: tuple[Tensor, int] | None = None  # of the last step
        self._used: Tensor | None = None  # the scale of the last loss
        self._unscaled: set[int] = set()
        self._clips: dict[int, tuple[float, float | None, float]] = {}
        self._usual_clips: dict[int, tuple[float, float | None, float]] = {}

    @property
    def name(self) -> Literal["16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true"]:
        """Lightning's name of the precision."""
        own = _NAMES.get(
            (self.plan.weights, self.plan.compute), "16-true" if self.plan.weights == "fp16" else "bf16-true"
        )
        return cast(Any, own)

    @property
    def plan_now(self) -> Plan:
        """What the run computes in: precision may have been raised on the way."""
        return self.guards[0].plan if self.guards else self.plan

    @property
    def waiting(self) -> bool:
        """Whether a loss has gone backward since the last step."""
        return bool(self._losses)

    def begin(self, device: torch.device) -> None:
        """Compute on this device from here on; on a CPU with CUDA's autocast lists. The scale of a run before stays."""
        self.end()
        start = 1.0 if self.plan.scaling is None else self.plan.scaling.init_scale
        self.scale = torch.full((), start, dtype=torch.float32, device=device)
        self._good_steps, self._overflows = torch.zeros_like(self.scale), torch.zeros_like(self.scale)
        if self._ended:
            saved_state.restore_scale(self.scale, self._good_steps, self._ended[0]["judge"], self.plan)
        self.arithmetic.begin(device)

    def end(self) -> None:
        """Let go of guards, ledgers, schedulers and lists. Raises what the last steps came to, such as a stop."""
        guards, self.guards = self.guards, []
        self._losses, self._loss, self._used = [], None, None
        for own in (self._unscaled, self._clips, self._usual_clips):
            own.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self.arithmetic.end)
            for guard in guards:
                stack.callback(guard.close)
                stack.callback(cast(CalledSchedules, guard.run.schedules).release)
            if guards:
                # Frameworks save checkpoints after a run, too; it is the last thing before guards are closed.
                stack.callback(self._keep, guards)
            for guard in guards:
                stack.callback(guard.drain)

    def _keep(self, guards: list[Guard]) -> None:
        self._ended = [_collect(guard) for guard in guards]
        self._ended_scaler = saved_state.scaler_state(guards[0])

    def add(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, alone: bool = True) -> Guard:
        """Guard one more optimizer of the model; `alone` where there is no other."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise GuardError("LBFGS runs its closure several times in a step, which no guard sees. Use AdamW or SGD.")
        watching, number = self.watching, len(self.guards)
        folder = watching.folder
        if folder is not None and number:
            folder = folder / f"optimizer-{number}"
        guard = Guard(
            model,
            optimizer,
            plan=self.plan,
            clip_norm=math.inf if self.plan.clip is None else None,
            policy=watching.resolve(self.plan, alone=alone),
            folder=folder,
            resume=watching.resume and folder is not None,
            record_layers_every=watching.layers_every,
            on_failure=watching.on_failure,
            steps=watching.steps,
        )
        guard.run.schedules = CalledSchedules(optimizer)
        guard.on_outcome = self._learn
        guard.share_scale(self.scale, self._good_steps, self._overflows)
        self.guards.append(guard)
        if is_first_process(None):
            say(guard.manifest)
        self._usual_clips[id(guard)] = guard.clip_norm, guard.clip_value, guard.norm_type
        if number < len(self._saved):
            _restore(guard, self._saved[number])
        return guard

    def _learn(self, outcome: Outcome) -> None:
        self.metrics.learn(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    def guard_of(self, optimizer: Any) -> Guard:
        """The guard of an optimizer, wrapped or not."""
        own = getattr(optimizer, "optimizer", optimizer)
        for guard in self.guards:
            if guard.optimizer is own:
                return guard
        raise GuardError(f"{type(own).__name__} is not one of the run's optimizers. Give it in configure_optimizers.")

    def schedules_of(self, optimizer: Any) -> CalledSchedules:
        """The schedulers of an optimizer."""
        return cast(CalledSchedules, self.guard_of(optimizer).run.schedules)

    def scale_loss(self, loss: Tensor, *, parts: int = 1) -> Tensor:
        """What to send backward instead of the loss, which is remembered for the next step.

        Args:
            loss: The loss; unscaled.
            parts: What it was divided by, as one of so many micro-batches.
        """
        seen = loss.detach().to(torch.float32).reshape(())
        self._losses.append(seen if parts == 1 else seen * parts)
        if self.plan_now.scaling is None:
            return loss
        # With one optimizer the scale cannot move before its step.
        self._used = self.scale if len(self.guards) == 1 else self.scale.clone()
        return loss.to(torch.float32) * self.scale.to(loss.device)

    def step(self, optimizer: Any, *, epoch: int | None = None, batch: int | None = None) -> Outcome:
        """Make the optimizer's step with the gradients that are there, or leave everything as it is."""
        guard = self.guard_of(optimizer)
        self.rescale(optimizer)
        if self._losses:
            losses, self._losses = self._losses, []
            mean = losses[0] if len(losses) == 1 else torch.stack([loss.to(losses[0].device) for loss in losses]).mean()
            self._loss = mean, len(losses)
        if self._loss is None:
            raise GuardError("A step was asked for before any loss. Send it with manual_backward or fabric.backward.")
        loss, num = self._loss
        divisor: float | Tensor = 1.0
        if self._used is not None and self._used is not self.scale:
            divisor = self._used / self.scale
            loss = loss.to(divisor.device) * divisor  # the mean is taken by dividing again
        norm, value, norm_type = self._clips.pop(id(guard), self._usual_clips[id(guard)])
        guard.clip_by(norm=norm, value=value, norm_type=norm_type)
        guard.count_from(epoch, batch)
        return guard.take_step(LossSum(loss=loss, weight=divisor, num=num))

    def clip(self, optimizer: Any, *, norm: float = math.inf, value: float | None = None) -> None:
        """Clip the gradients in the next step of this optimizer: unscaled, in FP32, and over all shards."""
        self._clips[id(self.guard_of(optimizer))] = norm, value, 2.0

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, for code that looks at them or clips them; `step` multiplies again.

        Numerics:
            With a scale that is a power of two both are exact. FP16 gradients become FP32 ones.
        """
        if self._used is None or id(self.guard_of(optimizer)) in self._unscaled:
            return
        own = self.guard_of(optimizer).optimizer
        widen_fp16(own)
        multiply_gradients(own, self._used.reciprocal())
        self._unscaled.add(id(self.guard_of(optimizer)))

    def rescale(self, optimizer: Any) -> None:
        """Take `unscale` back."""
        guard = self.guard_of(optimizer)
        if id(guard) not in self._unscaled or self._used is None:
            return
        self._unscaled.discard(id(guard))
        multiply_gradients(guard.optimizer, self._used)

    def drain(self) -> None:
        """Read what became of all steps; waits for the device."""
        for guard in self.guards:
            guard.drain()

    def state_dict(self) -> dict[str, Any]:
        """Scale, windows, counters and debts of every guard; waits for the device."""
        self.drain()
        guards = [_collect(guard) for guard in self.guards] or self._ended
        return {"schema": saved_state.SCHEMA, "guards": guards} if guards else {}

    def scaler_state(self) -> dict[str, Any] | None:
        """The scale as a torch.amp.GradScaler would save it; None where the loss is not scaled."""
        return saved_state.scaler_state(self.guards[0]) if self.guards else self._ended_scaler

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, or the state of a torch.amp.GradScaler."""
        if "guards" not in state:
            saved_state.restore_scale(self.scale, self._good_steps, state, self.plan)
            return
        self._saved = saved_state.check(state, num_guards=len(self.guards))
        for guard, own in zip(self.guards, self._saved, strict=False):
            _restore(guard, own)
        if not self.guards and self._saved and self._saved[0]["plan"]["scaling"] is not None:
            saved_state.restore_scale(self.scale, self._good_steps, self._saved[0]["judge"], self.plan)


def _collect(guard: Guard) -> dict[str, Any]:
    """Everything of a guard that the framework does not save itself; plain values and CPU tensors."""
    return {**collect_own(guard.run), "schedules": cast(CalledSchedules, guard.run.schedules).debts()}


def _restore(guard: Guard, state: dict[str, Any]) -> None:
    """Bring a guard to where `_collect` was called."""
    run = guard.run
    if Plan(**state["plan"]).compute == run.plan.compute:
        run.take_plan(run.plan, state["islands"])  # those that were made on the way, too
    restore_own(run, state)
    cast(CalledSchedules, run.schedules).load_debts(state["schedules"])
