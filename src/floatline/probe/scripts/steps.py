"""StepCapture: records steps of a loop that runs on: healthy ones now and then, and the one that fails."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.base.work_clock import WorkClock
from floatline.probe.scripts.last_forward import HeldForwards, has_room, replay_forward
from floatline.probe.scripts.recording import BetweenSteps, Schedule, ScriptRecording, fails_by_state
from floatline.probe.scripts.retries import ATTEMPTS, Retries
from floatline.probe.scripts.weight_copies import LateSteps, Weights, all_finite, all_weights, find_loose, find_model
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import ForwardEvent, ScalerStepEvent, StepEvent
from floatline.probe.watch.functional_steps import FunctionalWeights
from floatline.probe.watch.health import Health, LateHealth, ScaledLoss, are_losses_finite, are_losses_lost
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.own_updates import UPDATES, LooseWeights
from floatline.probe.watch.patches import is_inside_compiled
from floatline.probe.watch.steps import share_of_dead_moments

Kind = Literal["healthy", "failed", "skipped"]
_SIXTEEN_BITS = frozenset((torch.float16, torch.bfloat16))
# Steps in a row that a scaler left out: a search takes fewer, from 65536 down to 1 takes 16.
_SEARCH = (8, 18)
# How often work without gradients between steps is recorded.
_EVALUATIONS = 3
# How often recording begins again where weights of another format are trained.
_MOST_FORMATS = 4


@dataclass(frozen=True)
class Captured:
    """One recorded step.

    Args:
        step: Its number.
        kind: 'failed' where loss, gradients or weights were not finite, 'skipped' where a scaler left it out.
        trace: What was recorded.
        seconds: How long it took.
    """

    step: int
    kind: Kind
    trace: Trace
    seconds: float


class StepCapture:
    """Listens to a light watch.

    Healthy steps are recorded when `Schedule` says so. A step fails where its loss or gradients are not finite and
    nothing will leave it out. The weights, which are still healthy then, are copied; the next step runs on that copy
    and is recorded; then the script gets back the weights that it had (`Retries`).

    Args:
        seen: The watch.
        asked: A step that is recorded, whenever it comes; None leaves it to what is seen.
        planned: Steps that are recorded, and no other, whatever is seen: processes that train together must record the
            same ones. None leaves it to what is seen.

    Attributes:
        steps: What was recorded.
        seconds: How long recording took.
        errors: What went wrong with it, or is not as it should be.
        retries: Steps that are run on the weights from before a failure.
        setup: What the script computed in 16 bits before its first pass; None where that could not be recorded.
        evaluations: What it computed in 16 bits without gradients between steps, the first times.
    """

    def __init__(self, seen: Watch, asked: int | None = None, planned: Collection[int] | None = None) -> None:
        self.steps: list[Captured] = []
        self._asked, self._planned = asked, planned
        self.seconds = 0.0
        self.errors: list[str] = []
        self.retries = Retries()
        self.setup: Trace | None = None
        self.evaluations: list[Trace] = []
        self._seen = seen
        self._recording = ScriptRecording()
        self._last_step = self._applied_step = -1
        self._clock = WorkClock()
        self._schedule = Schedule()
        self._formats: set[frozenset[torch.dtype]] = set()  # of weights that were trained
        self._held = HeldForwards()
        self._before: Weights | None = None
        self._late = LateSteps(seen.late, self._fail_late)
        self._stepping: StepEvent | ScalerStepEvent | None = None
        self._kind: Kind = "healthy"
        self._skips = self._relapses = self._lost = 0
        self._worked = 0.0
        self._wanted = False
        self._evaluates = False
        self._broken = False  # recording went wrong, and is to be ended
        self._drops = False  # what is recorded now tells less than a later step
        self._spare: Captured | None = None  # it, for where no later one fails
        self._hunts = 0  # steps that are still recorded to see a lost loss come again
        self._rests_until = 0  # the first step that may be recorded next, for that or to see a failure again

    def begin_setup(self) -> None:
        """The script begins."""
        self._try(self._recording.begin_setup)

    def _end_setup(self) -> None:
        if self._seen.hooked:
            return
        trace = self._recording.end_setup()
        if trace is not None and self._evaluates:
            self.evaluations.append(trace)
            self._evaluates = False
        elif trace is not None:
            self.setup = trace

    def _begin_evaluation(self) -> None:
        """Work without gradients is recorded like that before training, the first times."""
        free = not self._recording.runs and not self._seen.hooked and not self._seen.compiled
        if free and len(self.evaluations) < _EVALUATIONS:
            self._evaluates = True
            self._recording.begin_setup()

    # What the watch tells.

    def see_compile(self) -> None:
        """The script compiles something: what is compiled must see no mode of ours."""
        self._try(self._end_setup)

    def begin_forward(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], event: ForwardEvent
    ) -> None:
        """A root module is about to run, with gradients."""
        self._try(self._end_setup)
        if self._seen.detailed:
            self._held.weigh(args, kwargs)
        self._held.add(event, root, args, kwargs)
        last, self._last_step = self._last_step, event.step
        if event.step == last:
            return
        if self._recording.early or (not self._recording.runs and self._is_wanted(event.step)):
            self._try(self._begin_with_forward)

    def _note_event(self) -> None:
        """Something happened: where it belongs to a new step, the recorded one is over."""
        if self._broken or (self._recording.runs and self._seen.step > self._recording.step):
            self._try(self._finish)

    def leave_step(self) -> None:
        """What comes now is no part of the step."""
        if self._evaluates:
            return
        self._try(self._end_setup)
        if self._recording.early or self._drops:
            self._try(self._finish if self._drops else self._recording.end)
            self._wanted, self._seen.callbacks.clear = True, self._begin_again
        elif self._recording.runs and self._stepping is not None and self._stepping.step >= self._recording.step:
            self._try(self._finish)
        self._try(self._begin_evaluation)

    def see_gradients(self, optimizer: Optimizer, event: StepEvent, health: Health) -> None:
        """An optimizer is about to step."""
        self._stepping = event
        if isinstance(health, LateHealth):
            self._try(lambda: self._look_late(optimizer, event, health))
        elif event.through_scaler:
            return  # it has been asked, and lets the step through or not
        elif not math.isfinite(health):
            self._fail(event, None)
        elif self._seen.detailed or _is_narrow(optimizer):
            self._before = Weights.copy(_parameters(optimizer), most=True)

    def _look_late(self, optimizer: Optimizer, event: StepEvent, health: LateHealth) -> None:
        """On a GPU, the answers about steps that were asked about are there by now; and this step's is asked for.

        What a scaler lets through leaves the weights healthy: no copy of them is needed.
        """
        self._seen.late.read(before=event.step)
        guarded, detailed = event.through_scaler, self._seen.detailed
        if guarded and event.scales_itself:
            return  # it leaves the step out by itself, if it must
        if not guarded and not self.retries.pending and not self.retries.num:  # after a failure nobody asks for more
            self._late.keep(optimizer, event.step, detailed=detailed)
        self._late.ask(event, health)

    def _fail_late(self, event: StepEvent) -> None:
        if not len(event.largest):
            event.largest = [math.nan]
        healthy = None if event.through_scaler else self._late.weights
        self._try(
            lambda: self._fail(event, healthy, of_step=self._seen.step if healthy is None else self._late.kept_step)
        )

    def see_weights(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._judge_weights(optimizer)
        if len(self._seen.optimizers) == 1:  # no other needs them in this step, and the script may end now
            self._try(self.retries.give_back)

    def _judge_weights(self, optimizer: Optimizer) -> None:
        event, before = self._stepping, self._before
        if event is None:
            return
        self._count(event, optimizer)
        if self._seen.detailed and _is_narrow(optimizer) and isinstance(event, StepEvent):
            event.dead_moments = share_of_dead_moments(optimizer)
            if before is None and self._late.kept_step == event.step:  # the next step would spoil the optimizer's state
                before = self._late.weights
        elif before is not None and not before.on_cpu:
            return
        if (before is None and not self._recording.runs) or self._kind == "failed":
            return
        self._before = None
        if not all_finite(_parameters(optimizer)):
            if isinstance(event, StepEvent):
                event.finite_after = False
            self._fail(event, before)

    def _count(self, event: StepEvent | ScalerStepEvent, optimizer: Optimizer) -> None:
        """A step was applied; several optimizers may belong to it."""
        if event.step != self._applied_step:
            self._applied_step = event.step
            self._schedule.num_applied += 1
        formats = frozenset(group["params"][0].dtype for group in optimizer.param_groups if group["params"])
        if formats not in self._formats:
            if self._formats and len(self._formats) < _MOST_FORMATS:
                self._schedule.begin_again()
            self._formats.add(formats)

    def end_step(self, *, late: bool = False) -> None:
        """A step is over. Where the next one is recorded, what is computed before its forward pass belongs to it."""
        self._try(self._end_setup)
        if self._drops:
            self._try(self._finish)
        step = self._seen.step + 1
        if self._recording.runs or not self._is_wanted(step):
            return
        if self._seen.modules.roots or not all_weights(self._seen):
            self._begin_early(step)
        else:  # no module is called: a whole step is recorded from here on, or from the next backward pass on
            self._try(lambda: self._begin_without_module(step + late))

    def see_functional_gradients(self, gradients: dict[str, Tensor]) -> None:
        """torch.func has taken gradients."""
        self._try(lambda: self._recording.give_gradients(gradients))

    def begin_backward(self) -> None:
        """A loop that calls no module goes backward: it trains, and was set up."""
        self._try(self._end_setup)

    def end_backward(self) -> None:
        """A loop without modules and optimizers has gradients: it updates its weights, then it begins a step."""
        self._try(self._end_setup)
        if self._recording.runs:
            self._recording.see_backward()
        elif self._is_wanted(self._seen.step + 1, after=1):
            self._try(self._begin_between)

    def leave_mode(self, mode: object) -> None:
        """The script leaves a dispatch mode, inside of which a step is recorded: that ends here."""
        if self._recording.hides(mode):
            self._try(self._recording.end if self._recording.early else self._finish)

    def see_attempt(self, event: ScalerStepEvent, losses: Sequence[ScaledLoss | float]) -> None:
        """A scaler has let a step through, or not."""
        self._stepping = event
        if event.applied:
            self._skips, self._worked = 0, max(self._worked, event.scale)
            if are_losses_lost(losses):
                self._fail(event, None)
            return
        self._stepping = event  # no optimizer steps: the step is over all the same
        self._drop_first()
        self._held.note_bad_inputs(event.step)
        self._kind = "skipped"
        self._skips += 1
        self._relapses += event.scale <= self._worked
        self._wanted = self._wanted or self._skips in _SEARCH or self._relapses in (3, 9)
        if not are_losses_finite(losses):  # no scale is searched for in a forward pass: the next step may tell why
            self._lost += 1
            recorded = self._recording.runs and event.step == self._recording.step and not self._drops
            self._hunts = 0 if recorded else ATTEMPTS if self._lost in (1, 3, 9) else self._hunts

    # What is done about it.

    def _fail(self, event: StepEvent | ScalerStepEvent, healthy: Weights | None, *, of_step: int | None = None) -> None:
        """A step failed.

        Args:
            event: Its optimizer's.
            healthy: The weights from before it; None: those that are there now.
            of_step: The step that has these weights; None: this one.
        """
        self._drop_first()
        if not self._recording.runs or event.step >= self._recording.step:
            self._kind = "failed"
        if self._planned is not None:
            self._held.note_bad_inputs(event.step)
            return
        if (self._recording.runs and not self._drops) or self.retries.pending or self.retries.num:
            return
        self._held.note_bad_inputs(event.step)
        if self._replays_at_once(event.step):
            return
        found = Weights.copy(all_weights(self._seen)) if healthy is None else healthy
        if self.retries.keep(found, event.step) and of_step is not None and abs(of_step - event.step) > 1:
            tried = f"its cause was looked for with the weights of step {of_step}, the nearest that were kept"
            self.errors.append(f"step {event.step} failed; {tried}")

    def _replays_at_once(self, step: int) -> bool:
        """Record a failed step of a loop that hands its weights to torch.func: with what it was given, it runs again.

        Such a loop may make new weights in each step, so that none of a later one can be lent older ones.
        """
        forward = self._held.find(step) if self._held.calls else None
        root = None if forward is None else forward.root
        if forward is None or not isinstance(root, FunctionalWeights) or not root.runs_again or self._recording.runs:
            return False
        if not isinstance(self._stepping, StepEvent) or self._stepping.name != UPDATES:
            return False
        trace = replay_forward(forward, root)
        if trace is not None:
            self.steps.append(Captured(step, "failed", trace, 0.0))
            self.retries.num = ATTEMPTS
        return trace is not None

    def _drop_first(self) -> None:
        """The first step fails, and nobody recorded what its batch was made of: a later one tells more."""
        self._drops = self._recording.begins_late and self._recording.runs

    def _is_wanted(self, step: int, *, after: int = 0) -> bool:
        """Whether a step is recorded that begins next; `after` is how many will have been applied by then."""
        self._kind = "healthy"
        if self._planned is not None:
            return step in self._planned
        if step == self._asked:
            self._wanted, self._asked = True, None
        if self.retries.pending:
            return not self.retries.num or step >= self._rests_until
        hunts = self._hunts > 0 and step >= self._rests_until
        self._hunts -= hunts
        if not self._wanted and not hunts and self._schedule.num_applied + after < self._schedule.due:
            return False
        wanted, self._wanted = self._wanted or hunts, False
        if not wanted and not self._schedule.is_due(spent=self.seconds, after=after):
            return False
        self._seen.late.read()  # if the step before failed, this one is recorded on the weights from before it
        self._kind = "healthy"
        return True

    def _begin_early(self, step: int) -> None:
        self._try(lambda: self._recording.begin_early(step))
        self._wanted = not self._recording.runs

    def _begin_again(self) -> None:
        """Gradients are cleared after an evaluation that was no part of the step."""
        self._seen.callbacks.clear = None
        if self._wanted and not self._recording.runs:
            self._begin_early(self._seen.step)

    def _begin_with_forward(self) -> None:
        if not self._recording.runs and is_inside_compiled():
            self._wanted = True  # a later step is recorded, from its beginning outside
            return
        forward = self._held.calls[-1]
        model = find_model(self._seen, forward.root)
        loose = find_loose(self._seen, model)
        self._begin(forward.root, lambda: self._recording.begin(forward, model, loose))

    def _begin_without_module(self, step: int) -> None:
        model = LooseWeights(all_weights(self._seen))
        self._begin(model, lambda: self._recording.begin_without_module(step, model))

    def _begin_between(self) -> None:
        model = LooseWeights([*self._seen.weights.leaves.values()])
        recorder = BetweenSteps(model, lambda: self._try(self._put_on), lambda: self._try(self._settle))
        self._begin(model, lambda: self._recording.begin_between(self._seen.step + 1, recorder), at_once=False)

    def _begin(self, root: nn.Module, start: Callable[[], None], *, at_once: bool = True) -> None:
        if not self.retries.pending and self.retries.num and not all_finite(all_weights(self._seen)):
            self._recording.end()
            return  # a step that failed before has spoilt the weights: this one would show no cause
        if not has_room(root):
            self.errors.append("a step was not recorded: the GPU has not enough free memory for its FP32 twins")
            self._recording.end()
            self.retries.drop()
            return
        self._clock = WorkClock()
        if at_once:
            self._put_on()
        start()
        self._wanted, self._seen.callbacks.event, self._seen.callbacks.clear = False, self._note_event, None

    def _put_on(self) -> None:
        self.retries.put_on(all_weights(self._seen))

    def _settle(self) -> None:
        self.retries.settle(failed=self._kind == "failed")

    def finish(self) -> None:
        """The script is over, or is about to be explained."""
        self._try(self._end_setup)
        self._try(self._seen.late.read)
        if self._recording.early:
            self._try(self._recording.end)
        elif self._recording.runs:
            self._try(self._finish)
        if self._spare is not None and all(one.kind == "healthy" or fails_by_state(one.trace) for one in self.steps):
            self.steps.insert(0, self._spare)
        self._spare = None

    def _finish(self) -> None:
        if self._seen.hooked:
            return  # the recorder's own hooks cannot be removed now; the next event ends it
        if is_inside_compiled():  # nor can the recorder be left: the next event outside ends it
            self._recording.cut()
            self.retries.give_back()
            self._seen.callbacks.event = self._note_event
            return
        if self._broken or self._drops:
            trace = self._recording.end()
            if trace is not None and not self._broken and self._kind == "failed":
                self._spare = Captured(self._recording.step, "failed", trace, self._clock.seconds)
            self._broken, self._drops, self._seen.callbacks.event = False, False, None
            return
        self._seen.late.read()
        trace, self._seen.callbacks.event = self._recording.end(), None
        if trace is None:
            return
        again = self.retries.runs and self.retries.has_more and fails_by_state(trace)
        if again:  # the optimizer still holds what the failed step left in it: this one tells nothing
            self._kind = "healthy"
        self._settle()
        # What comes before the next forward pass went into this step. A step or two further on a whole one begins: now
        # one, now two, as what fails may be every second step.
        self._rests_until = self._recording.step + 2 + (self._hunts + self.retries.num) % 2
        seconds = self._clock.seconds
        self.seconds += seconds
        if not again:
            self.steps.append(Captured(self._recording.step, self._kind, trace, seconds))

    def replay_last_forward(self) -> bool:
        """Record the last forward pass once more, where the script ended before its step could fail.

        Of a step that failed and that no later one was tried instead of, it is the first pass, on the weights that were
        kept.

        Returns:
            Whether something that it gives is not finite.
        """
        if not self._held.calls or any(captured.kind == "failed" for captured in self.steps):
            return False
        if self._planned is not None:  # other processes may not run it with this one
            return False
        if not self.has_untried and not all_finite(all_weights(self._seen)):
            return False
        forward = self._held.find(self.retries.step)
        with self.retries.lent(all_weights(self._seen)):
            trace = replay_forward(forward, find_model(self._seen, forward.root))
        if trace is not None:
            self.steps.append(Captured(forward.event.step, "failed", trace, 0.0))
        return trace is not None

    @property
    def ended_at(self) -> int | None:
        """The applied step at which the time for recording was spent; None where it was not."""
        return self._schedule.ended_at

    @property
    def records(self) -> bool:
        """Whether a step is recorded now."""
        return self._recording.runs

    @property
    def has_untried(self) -> bool:
        """Whether a step failed, and the script ended before another was tried on the weights from before it."""
        if self._lost and not any(one.kind != "healthy" for one in self.steps):
            return True  # a scaler left it out: its weights are there still
        return self.retries.pending and not self.retries.num

    def _try(self, work: Any) -> None:
        """Do something beside the script; what goes wrong with it must not end it."""
        try:
            work()
        except Exception as error:
            self.errors.append(f"a step was not recorded: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            with contextlib.suppress(Exception):
                self.retries.drop()
            if self._seen.hooked:
                self._broken, self._seen.callbacks.event = self._recording.runs, self._note_event
                return
            with contextlib.suppress(Exception):
                self._recording.end()
            self._seen.callbacks.event = None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_narrow(optimizer: Optimizer) -> bool:
    """Whether an optimizer holds 16-bit weights: its own arithmetic may then fail."""
    return not _SIXTEEN_BITS.isdisjoint([p.dtype for p in optimizer.param_groups[0]["params"][:4]])
