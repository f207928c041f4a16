"""IslandJudge: whether captured steps are healthy with some modules in FP32, within a tolerance that knows rounding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from floatline.base.json_values import encode_number
from floatline.base.work_clock import WorkClock
from floatline.diagnosis.detectors.loss_scale import best_factor
from floatline.diagnosis.islands.errors import (
    ReplayOutcome,
    Tolerance,
    measure_errors,
    moved_weights,
    name_end,
    relative_error,
)
from floatline.diagnosis.islands.log import SearchLog, key_of, question
from floatline.precision.fp32_call import tf32_products
from floatline.precision.islands import Line, LineIslands
from floatline.precision.user_frames import find_raiser
from floatline.probe.steps.capture import Agreement, CapturedStep, Replay, compare_steps
from floatline.probe.steps.captured_forward import CapturedForward
from floatline.probe.trace.trace import Trace


class BudgetUsed(Exception):  # noqa: N818 - no error: the search ends with what it has
    """There is no time for another replay."""


class ErrorSpread(Protocol):
    """Answers questions of a search elsewhere, side by side."""

    def ask(self, questions: Sequence[tuple[int, Sequence[str], Sequence[Line]]]) -> Iterable[tuple[str, Any]]:
        """Keys and answers for the log, of steps by number with modules and lines in FP32; some may be missing."""
        ...


class IslandJudge:
    """Replays of captured steps, each question asked once.

    Numerics:
        The noise is measured, not assumed: the step is run in FP32 with every weight moved by up to half a unit in
        the last place of the 16-bit format, from a fixed seed. That is what rounding the weights alone does, so a
        16-bit step has it in any case; and it is the same wherever the fragile operation is, because no operation is
        computed otherwise. A gradient that is nothing but rounding (such as that of a bias before a norm) is
        all noise by this measure, and no witness. Checked by tests/diagnosis/islands/test_search.py.

    Args:
        steps: The steps.
        tolerance: How near to FP32.
        log: What is known already.
        budget: Seconds of work after which no replay begins.
        on_replay: Called before every replay.
        spread: Answers several questions at once elsewhere; what it does not answer is replayed here.
    """

    def __init__(
        self,
        steps: Sequence[CapturedStep],
        *,
        tolerance: Tolerance,
        log: SearchLog,
        budget: float,
        on_replay: Callable[[], None],
        spread: ErrorSpread | None = None,
    ) -> None:
        self.steps = list(steps)
        self._spread = spread
        self.tolerance = tolerance
        self.num_replays = 0
        self.tried: dict[tuple[str, ...], bool] = {}
        self._log, self._budget, self._on_replay = log, budget, on_replay
        self._clock = WorkClock()
        self._order = list(range(len(self.steps)))
        self._wide: dict[int, Replay] = {}
        self._traces: dict[tuple[int, tuple[str, ...]], Trace] = {}
        self._noise: dict[int, dict[str, float]] = {}
        self._last = 0.0

    @cached_property
    def _keys(self) -> list[str]:
        return [key_of(step, asdict(self.tolerance)) for step in self.steps]

    def passes(self, modules: Sequence[str], lines: Sequence[Line] = ()) -> bool:
        """Whether every step is healthy with these modules, and lines of code, in FP32."""
        self._ask_elsewhere(modules, lines)
        for number, i in enumerate(self._order):
            if not self.outcome(i, modules, lines).passes:
                # What fails one set fails many: the next set meets this step first.
                self._order.insert(0, self._order.pop(number))
                if not lines:
                    self.tried[tuple(modules)] = False
                return False
        if not lines:
            self.tried[tuple(modules)] = True
        return True

    def _ask_elsewhere(self, modules: Sequence[str], lines: Sequence[Line]) -> None:
        open_ones = [i for i in self._order if self.known(i, modules, lines) is None]
        if self._spread is None or len(open_ones) < 2:
            return
        self._on_replay()
        for key, answer in self._spread.ask([(i, tuple(modules), tuple(lines)) for i in open_ones]):
            if self._log.get(key) is None:
                self._log.put(key, answer)

    def outcome(self, i: int, modules: Sequence[str] = (), lines: Sequence[Line] = ()) -> ReplayOutcome:
        """One step with these modules and lines in FP32, at its own loss scale, or at the one that fits it."""
        key = question(self._keys[i], "outcome", modules, lines)
        known = self.known(i, modules, lines)
        if known is not None:
            return known
        step = self.steps[i]
        found = self._try(i, step.scale, modules, lines)
        if not found.passes and math.isfinite(found.loss):
            fitting = self._fitting_scale(i)
            if fitting != step.scale:
                other = self._try(i, fitting, modules, lines)
                found = other if other.passes else found
        self._log.put(key, {name: _as_text(value) for name, value in asdict(found).items()})
        return found

    def errors(self, i: int, lines: Sequence[Line] = ()) -> dict[str, float]:
        """How far each output, or gradient, of a step is from FP32's with these lines in FP32; none where it raises."""
        try:
            return measure_errors(self.steps[i], self.replay(i, lines=lines), self.reference(i))
        except BudgetUsed:
            raise
        except Exception:  # the user's code, in dtypes that it may not take
            return {}

    def is_near(self, i: int, name: str, error: float) -> bool:
        """Whether an error of an output, or gradient, is within the tolerance."""
        limit = self.tolerance.parameter if name else self.tolerance.whole
        return error <= limit or self._is_noise(i, name, error)

    def passes_in_tf32(self, modules: Sequence[str]) -> bool:
        """Whether every step is healthy, too, with the products of these modules in TF32; no where there is none."""
        if not all(step.device.type == "cuda" for step in self.steps):
            return False
        # What they are compared with is FP32 itself, so it is made first.
        scales = [self.outcome(i, modules).scale for i in range(len(self.steps))]
        for i in self._order:
            self.reference(i)
            self.noise(i)
        with tf32_products():
            return all(self._try(i, scales[i], modules, ()).passes for i in self._order)

    def known(self, i: int, modules: Sequence[str], lines: Sequence[Line] = ()) -> ReplayOutcome | None:
        """The outcome of a set that was tried on this step; None where it was not."""
        known = self._log.get(question(self._keys[i], "outcome", modules, lines))
        return None if known is None else ReplayOutcome(**{name: _as_float(value) for name, value in known.items()})

    def reference(self, i: int) -> Replay:
        """The step in FP32."""
        if i not in self._wide:
            self._wide[i] = self.replay(i, precision="fp32")
        return self._wide[i]

    def trace(self, i: int, modules: Sequence[str] = ()) -> Trace:
        """The operations of a step with these modules in FP32, beside their FP32 values."""
        key = i, tuple(modules)
        if key not in self._traces:
            self._traces[key] = self._record(i, modules)
        return self._traces[key]

    def noise(self, i: int) -> dict[str, float]:
        """Ordinary rounding noise: error of each parameter's gradient, and of all under ''."""
        if i not in self._noise:
            key = question(self._keys[i], "noise")
            known = self._log.get(key)
            if known is None:
                with moved_weights(self.steps[i]):
                    moved = self.replay(i, precision="fp32")
                known = measure_errors(self.steps[i], moved, self.reference(i))
                self._log.put(key, {name: _as_text(value) for name, value in known.items()})
            self._noise[i] = {name: float(value) for name, value in known.items()}
        return self._noise[i]

    def _record(self, i: int, modules: Sequence[str]) -> Trace:
        try:
            return self.replay(i, islands=modules, trace=True).trace or Trace()
        except BudgetUsed:
            raise
        except Exception as error:  # the user's code does not run in these dtypes
            spot = find_raiser(error.__traceback__)
            return Trace(meta={"raised": (spot.file, spot.line, next(iter(str(error).splitlines()), ""))})

    def update_noise(self, i: int) -> float:
        """Error of the optimizer's update in FP32 with weights moved as `noise` moves them."""
        with moved_weights(self.steps[i]):
            moved = self.replay(i, precision="fp32", update=True).updates or {}
        wide = self.replay(i, precision="fp32", update=True).updates or {}
        return relative_error(moved, wide)

    def _try(self, i: int, scale: float, modules: Sequence[str], lines: Sequence[Line]) -> ReplayOutcome:
        try:
            replay = self.replay(i, scale=scale, islands=modules, lines=lines)
        except BudgetUsed:
            raise
        except Exception as error:  # the user's code, in dtypes that it may not take
            words = next(iter(str(error).splitlines()), "")
            return ReplayOutcome(False, False, math.nan, math.nan, scale, f"{type(error).__name__}: {words}")
        why, error = self._find_fault(i, replay, bare=not modules and not lines)
        return ReplayOutcome(not why, replay.finite, replay.loss, error, scale, why)

    def _find_fault(self, i: int, replay: Replay, *, bare: bool) -> tuple[str, float]:
        """What is wrong with a replay, and its error."""
        if not math.isfinite(replay.loss):
            return f"the loss is {replay.loss:g}", math.nan
        if not replay.finite:
            bad = next((n for n, g in replay.raw.items() if not bool(g.isfinite().all())), "")
            return f"{name_end(self.steps[i], bad)} is not finite", math.nan
        reference = self.reference(i)
        errors = measure_errors(self.steps[i], replay, reference)
        whole = errors.get("", max(errors.values(), default=0.0))
        for name, error in errors.items():
            # The noise is asked for only where it can change the answer.
            if not self.is_near(i, name, error):
                return f"{name_end(self.steps[i], name)} is {_percent(error)} off FP32", whole
        if isinstance(self.steps[i], CapturedForward):
            return "", whole
        lost = self._find_lost(i, compare_steps(replay, reference).parameters, bare=bare)
        return (f"{100 * lost[1]:.0f} % of the gradient of {lost[0]} are lost to zero" if lost else ""), whole

    def _is_noise(self, i: int, name: str, error: float) -> bool:
        """Whether ordinary rounding explains an error, or the gradient is rounding itself and says nothing."""
        noise = self.noise(i).get(name, 0.0)
        if error <= min(self.tolerance.noise * noise, self.tolerance.most):
            return True
        return not isinstance(self.steps[i], CapturedForward) and bool(name) and noise > self.tolerance.parameter

    def _find_lost(self, i: int, parameters: Mapping[str, Agreement], *, bare: bool) -> tuple[str, float] | None:
        shares = self._lost_shares(i, parameters)
        if max(shares.values(), default=0.0) > self.tolerance.lost:
            noise = self.noise(i)
            shares = {n: share for n, share in shares.items() if noise.get(n, 0.0) <= self.tolerance.parameter}
        name = max(shares, key=lambda n: shares[n], default="")
        if not name or shares[name] <= self.tolerance.lost:
            return None
        usual = self._median_loss(i, shares) if bare else self._usual_loss(i)
        if shares[name] <= self.tolerance.noise * usual:
            return None
        return name, shares[name]

    def _lost_shares(self, i: int, parameters: Mapping[str, Agreement]) -> dict[str, float]:
        sizes = {name: int(gradient.count_nonzero()) for name, gradient in self.reference(i).raw.items()}
        return {name: a.lost / sizes[name] for name, a in parameters.items() if a.lost and sizes.get(name)}

    def _usual_loss(self, i: int) -> float:
        """What the median parameter loses without an island; 0 where that step is not finite."""
        key = question(self._keys[i], "usual loss")
        known = self._log.get(key)
        if known is None:
            shares: dict[str, float] = {}
            if self.outcome(i).finite:
                bare = self.replay(i, scale=self.steps[i].scale)
                shares = self._lost_shares(i, compare_steps(bare, self.reference(i)).parameters)
            known = self._median_loss(i, shares)
            self._log.put(key, known)
        return float(known)

    def _median_loss(self, i: int, shares: Mapping[str, float]) -> float:
        row = sorted(shares.get(name, 0.0) for name in self.reference(i).raw)
        return row[len(row) // 2] if row else 0.0

    def _fitting_scale(self, i: int) -> float:
        """The loss scale that the step's FP32 gradients leave room for; its own where it has no scaler."""
        step = self.steps[i]
        if step.plan.scaling is None or step.plan.compute != "fp16":
            return step.scale
        key = question(self._keys[i], "fitting scale")
        known = self._log.get(key)
        if known is None:
            factor = best_factor(self.trace(i))
            known = min(max(step.scale * factor, step.plan.scaling.floor), step.plan.scaling.cap)
            self._log.put(key, known)
        return float(known)

    def replay(self, i: int, *, lines: Sequence[Line] = (), **options: Any) -> Replay:
        """One replay, if there is time for another as long as the last."""
        if self._clock.seconds + self._last > self._budget:
            raise BudgetUsed
        self._on_replay()
        self.num_replays += 1
        clock = WorkClock()
        with contextlib.ExitStack() as stack:
            if lines:
                stack.enter_context(LineIslands(lines))
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            replay = self.steps[i].replay(**options)
        if not options.get("trace"):
            self._last = clock.seconds
        return replay


def _percent(share: float) -> str:
    """'12 %', and '3.4 %' of less than 10."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def _as_text(value: Any) -> Any:
    return encode_number(value) if isinstance(value, float) else value


def _as_float(value: Any) -> Any:
    """Also as the first version wrote it: nan and inf."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf") else value


# The error of an update from which it is spoken of: Adam's first updates are signs, which noise turns over.
_WRONG = 0.5
# The share of weights that stand still though they have a gradient.
_STUCK = 0.5


@dataclass(frozen=True)
class UpdateFault:
    """What the updates of the steps are like.

    Args:
        error: Norm of the difference to FP32's update over that of FP32's, the largest of the steps; None where
            the weights are 16-bit, and FP32 cannot make the same update.
        text: What is wrong; '' where nothing is.
    """

    error: float | None
    text: str


def find_update_fault(judge: IslandJudge, modules: Sequence[str]) -> UpdateFault | None:
    """Make the update of every step with these modules in FP32; None where a step has no optimizer.

    Args:
        judge: Replays the steps.
        modules: The island.
    """
    errors: list[float] = []
    for i, step in enumerate(judge.steps):
        if step.optimizer is None:
            return None
        scale = judge.outcome(i, modules).scale
        made = judge.replay(i, islands=modules, scale=scale, update=True)
        if any(not bool(update.isfinite().all()) for update in (made.updates or {}).values()):
            return UpdateFault(
                None, "the update is not finite: that is the optimizer's own arithmetic, see floatline.optim"
            )
        if step.plan.weights != "fp32":
            share = _stuck_share(made)
            if share > _STUCK:
                text = f"the updates of {100 * share:.0f} % of the weights with a gradient round to nothing"
                return UpdateFault(None, f"{text}: that is the optimizer's rounding, see floatline.optim")
            continue
        error = relative_error(made.updates or {}, judge.replay(i, precision="fp32", update=True).updates or {})
        errors.append(error)
        if error > max(_WRONG, judge.tolerance.noise * judge.update_noise(i)):
            return UpdateFault(error, f"the gradients agree with FP32, and the update is {100 * error:.0f} % off")
    return UpdateFault(max(errors, default=None), "")


def _stuck_share(made: Replay) -> float:
    moved = stuck = 0
    for name, update in (made.updates or {}).items():
        gradient = made.raw.get(name)
        if gradient is None:
            continue
        has = gradient != 0
        moved += int(has.sum())
        stuck += int((has & (update.to(has.device) == 0) & torch.isfinite(gradient)).sum())
    return stuck / moved if moved else 0.0
