"""The process in which a script that trains nothing runs: its calls of models are kept, looked into, and summed up."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from floatline.base.work_clock import WorkClock
from floatline.diagnosis.blame import ANY
from floatline.diagnosis.detectors.damage import find_changed_choices, find_wrong_results
from floatline.diagnosis.detectors.exceptions import describe_collision
from floatline.diagnosis.detectors.first_nonfinite import Birth, describe_birth, find_births
from floatline.diagnosis.detectors.operations import FORMATS, base_name, reached_by
from floatline.diagnosis.detectors.silent import largest_whole
from floatline.diagnosis.forward.forward_diagnosis import diagnose_captured
from floatline.diagnosis.forward.result import ForwardDiagnosis
from floatline.diagnosis.islands.errors import OUTPUTS
from floatline.errors import FloatlineError
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.precision.dtypes import NARROW
from floatline.precision.nested import find_tensors, map_tensors
from floatline.precision.random_state import RandomState
from floatline.probe.runs.cuda_on_cpu import as_cuda
from floatline.probe.scripts.run import run_prepared
from floatline.probe.scripts.setup import SetupRecorder
from floatline.probe.steps.captured_forward import Arguments, CapturedForward, capture_forward, copy_inputs
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.watch.patches import Aside, Patches, is_tracing
from floatline.running.seeds import seed_all

SEED = 0
# Of the calls of a module these are looked into, by number: the first fills caches, which later ones read.
_NUMBERS = frozenset((1, 2, 5, 17, 65))
# Seconds after which no further call is.
_BUDGET = 120.0
# Results outside of modules are damaged if what nothing is computed from any more is off by this share.
_DAMAGED = 0.1


@dataclass(frozen=True)
class _Seen:
    """One call that was looked into."""

    step: CapturedForward
    found: ForwardDiagnosis
    name: str
    in_inference: bool

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What is told first: findings, then what nobody can explain, then what is farthest from FP32."""
        worst = self.found.outputs[0].worst if self.found.outputs else None
        off = 0.0 if worst is None else worst.distance
        return bool(self.found.findings), bool(self.found.unexplained), off


@dataclass(frozen=True)
class _Wide:
    """A call with FP32 values of its inputs, and the operations that rounded them."""

    step: CapturedForward
    makers: set[int]

    def differs_from(self, step: CapturedForward) -> bool:
        """Whether FP32 gives other outputs for them than for the inputs of another call."""
        matches = step.match(step.replay(precision="fp32"), self.step.replay(precision="fp32"))
        return any(match.distance > OUTPUTS.whole for match in matches.values())


class CallWatch:
    """Keeps some calls of the modules that a script calls itself, and looks into each when it has returned.

    Attributes:
        worst: The call that tells most; None before the first.
        counts: Calls of each module that was called, by what it is called.
        num_seen: Calls that were looked into.
        errors: Why calls could not be looked into.
        outside: Records what is computed in 16 bits between calls.
    """

    def __init__(self) -> None:
        self.worst: _Seen | None = None
        self.counts: Counter[str] = Counter()
        self.num_seen = 0
        self.errors: list[str] = []
        self.outside = SetupRecorder()
        self._rounded: set[int] = set()  # operations outside of modules whose roundings a call does not bear
        self._calls: Counter[int] = Counter()
        self._inside = False
        self._spent = 0.0

    def patch(self, patches: Patches) -> None:
        """Begin to watch."""
        patches.wrap(nn.Module, "__call__", self._wrap)

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or is_tracing():
                return call(module, *args, **kwargs)
            self._inside = self.outside.paused = True
            step = wide = None
            try:
                step = self._keep(module, args, kwargs)
                wide = None if step is None else self._keep_wide(step, Arguments((args, kwargs)))
                return call(module, *args, **kwargs)
            finally:
                if step is not None:
                    self._look(step, wide, module)
                self._inside = self.outside.paused = False

        return called

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedForward | None:
        self._calls[id(module)] += 1
        self.counts[type(module).__name__] += 1
        if self._calls[id(module)] not in _NUMBERS or self._spent > _BUDGET or not _computes(module, args, kwargs):
            return None
        inputs = copy_inputs(Arguments((args, kwargs)))
        on = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        narrow = any(parameter.dtype in NARROW for parameter in module.parameters())
        plan = "fp16-mixed" if on and not narrow else "fp16-true"
        return capture_forward(module, inputs, plan=plan, random_state=RandomState.now())

    def _keep_wide(self, step: CapturedForward, inputs: Arguments) -> _Wide | None:
        """The same call with what it would have been given, had the script computed it in FP32; None where that is so.

        Only numbers that the script made in 16 bits outside of modules have another FP32 value than their own.
        """
        makers: set[int] = set()

        def widen(tensor: Tensor) -> Tensor:
            made_by, twin = self.outside.find_origin(tensor)
            if made_by is None or twin is None:
                return tensor
            makers.add(made_by)
            return twin.detach().clone()

        with Aside():
            wide = map_tensors(widen, inputs)
        if not makers:
            return None
        return _Wide(capture_forward(step.model, wide, plan=step.plan, random_state=step.random_state), makers)

    def _look(self, step: CapturedForward, wide: _Wide | None, module: nn.Module) -> None:
        clock = WorkClock()
        name = f"call {self._calls[id(module)]} of {type(module).__name__}"
        try:
            found = diagnose_captured(step, name, searches=False)
            seen = _Seen(step, found, name, torch.is_inference_mode_enabled())
            self.num_seen += 1
            if wide is not None:
                self._rounded |= wide.makers if wide.differs_from(step) else set()
            if self.worst is None or seen.rank > self.worst.rank:
                self.worst = seen
        except Exception as error:  # nothing here may end the script
            words = next(iter(str(error).splitlines()), "") if isinstance(error, FloatlineError) else repr(error)
            self.errors.append(f"{name} could not be looked into: {words}")
        self._spent += clock.seconds

    def sum_up(self, *, searches: bool) -> ForwardDiagnosis:
        """What was seen: the call that tells most, with its island, and what is wrong outside of modules."""
        self._inside = True
        outside = find_outside(self.outside.trace, self._rounded)
        calls, names = sum(self.counts.values()), ", ".join(self.counts) or "none"
        notes = (f"{self.num_seen} of {calls:,} calls of modules looked into ({names})", *self.errors[:3])
        if self.worst is None:
            why = "no module was called, or none could be looked into" if not outside else ""
            return ForwardDiagnosis("", "fp16-true", tuple(outside), 0.0, notes=notes, no_verdict=why)
        found = self.worst.found
        if searches and (found.findings or found.unexplained) and not found.fails_in_fp32:
            with torch.inference_mode(self.worst.in_inference):  # tensors that were made in it must stay in it
                found = diagnose_captured(self.worst.step, self.worst.name)
        told = f"what is told is of {self.worst.name}"
        return replace(found, findings=(*found.findings, *outside), notes=(*found.notes, *notes, told))


def _computes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is more than a container of functions: it has weights, or gets tensors."""
    return any(True for _ in module.parameters()) or bool(find_tensors(args, kwargs))


def find_outside(trace: Trace, rounded: Collection[int] = ()) -> list[Finding]:
    """What goes wrong in 16 bits outside of modules, where it shows in a result that nothing else is made of.

    Args:
        trace: What was recorded there.
        rounded: Operations that made what a call of a module gives other outputs for than for its FP32 value.
    """
    births = [birth for birth in find_births(trace) if any(out.pos_inf or out.nan for out in birth.op.outputs)]
    if births:
        return [describe_birth(births[0])]
    if rounded:
        return [_describe_rounding(trace.ops[min(rounded)], trace)]
    read = {own.made_by for op in trace.ops for own in op.inputs}
    ends = {op.index for op in trace.ops if op.index not in read and _is_damaged(op)}
    if not ends:
        return []
    changed = {op.index for op, _ in find_changed_choices(trace)}
    for finding in find_wrong_results(trace):
        own = [op for op in trace.ops if (op.file, op.line) == (finding.file, finding.line)]
        reached = {index for op in own for index in reached_by(op, trace)}
        if reached & ends or reached & changed:
            return [finding]
    return []


def _describe_rounding(op: Op, trace: Trace) -> Finding:
    """The finding about an operation that made an input of a module too coarse."""
    top = largest_whole(op, trace)
    dtype = op.outputs[0].dtype if op.outputs else ""
    if dtype in FORMATS and top > find_format(FORMATS[dtype]).max_exact_integer:
        return describe_collision(op, top)
    return describe_birth(Birth(op, ANY, f"the outputs are others if what {base_name(op.name)} gives is FP32"))


def _is_damaged(op: Op) -> bool:
    return any((out.error or 0.0) > _DAMAGED or out.blown for out in op.outputs)


def main(report: str, device: str, searches: str, words: list[str]) -> None:
    """Run a script to its end, and write the report; the process ends as the script would have.

    Args:
        report: Where the JSON goes.
        device: 'cuda' stands in for a GPU where there is none; '' does not.
        searches: Whether the smallest island is looked for; '' does not.
        words: The script's file, or `-m` and a module, and its arguments.
    """
    calls, patches, process = CallWatch(), Patches(), os.getpid()
    with as_cuda() if device else contextlib.nullcontext("") as note:
        seed_all(SEED)
        calls.patch(patches)
        try:
            with calls.outside:
                ended = run_prepared(words)
        finally:
            patches.undo()
        if os.getpid() != process:
            os._exit(ended.exit_code)  # a fork of the script that came back here
        sys.stdout.flush()
        found = calls.sum_up(searches=bool(searches))
    content = found.as_json() | {
        "tried": list(found.tried),
        "notes": [*found.notes, *([note] if note else [])],
        "fails_in_fp32": found.fails_in_fp32,
        "no_verdict": found.no_verdict,
    }
    Path(report).write_text(json.dumps(content), encoding="utf-8")
    sys.exit(ended.exit_code)
