"""The process in which a script runs: watches it, explains it, and writes what was found as JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from floatline.base.patched_sources import patch_sources
from floatline.diagnosis.detectors.damage import find_candidates
from floatline.diagnosis.detectors.first_nonfinite import measure_step_errors
from floatline.diagnosis.detectors.numbers import find_lost_decay
from floatline.diagnosis.detectors.operations import FORMATS
from floatline.diagnosis.scripts.evidence import (
    ScriptEvidence,
    fails_in_fp32,
    make_target,
    stand_in_for_fp32,
    step_fails,
)
from floatline.diagnosis.scripts.findings import find_in_script, find_otherwise, find_suspects, find_suspects_beside
from floatline.diagnosis.scripts.fp32_runs import LOSSES, READS, SEED, STEPS, WHOLE
from floatline.probe.runs.cuda_on_cpu import as_cuda
from floatline.probe.runs.records import RunRecord
from floatline.probe.scripts.kept_writes import KeptWrites
from floatline.probe.scripts.recording import BUDGET, PLANNED
from floatline.probe.scripts.run import ScriptRun, ScriptWatch
from floatline.probe.trace.trace import Op, Trace
from floatline.probe.watch.events import BY_HAND, ScalerStepEvent
from floatline.probe.watch.patches import Patches
from floatline.running.loss_log import LossLog
from floatline.running.quiet_runs import fork_off
from floatline.running.ranks import count_beside, own_path, read_number, wait_for_others
from floatline.running.read_values import ReadValues
from floatline.running.seeds import seed_all

# Steps that a verdict takes.
_FEWEST = 3


def main(report: str, trace: str, device: str, trial: str, steps: str, words: list[str]) -> None:
    """Run a script to its end, and write the report; the process ends as the script would have.

    Args:
        report: Where the JSON goes; each of several processes writes its own, see `path_of`.
        trace: Where to keep the trace of the step that was looked into; '' keeps none.
        device: 'cuda' stands in for a GPU where there is none; '' does not.
        trial: A file that says how the script is tried in a changed form, or looked at again: its texts, how many
            steps, a step to record, and where its writes go; '' runs the script as it is.
        steps: How many losses are written beside the report, to be held against FP32's.
        words: The script's file, or `-m` and a module, and its arguments.
    """
    fork_off(words)
    if trial:
        _try_changed(report, words, device, json.loads(Path(trial).read_text(encoding="utf-8")), int(steps))
    with as_cuda() if device else contextlib.nullcontext("") as note:
        if note:
            sys.stderr.write(f"floatline: {note}\n")
        seed_all(SEED)
        _run(report, trace, words, note, int(steps))


def _try_changed(report: str, words: list[str], device: str, trial: dict[str, Any], steps: int) -> None:
    """Run changed texts for some steps, with what is written kept apart, and end the process."""
    patch_sources(trial["sources"])
    writes = KeptWrites(Path(trial["folder"]))
    watched = _watch(words, ends_after=trial["steps"], records=trial["records"])
    seen = _Shown(report, steps)
    with as_cuda() if device else contextlib.nullcontext(""), writes.kept():
        seed_all(SEED)
        seen.begin()
        watched.run()
    seen.keep()
    write_report(watched, report, "", seen=seen, refused=writes.refused)
    wait_for_others(Path(report))
    sys.stdout.flush()
    os._exit(0)  # what the script does at its end is not kept apart any more


def _watch(words: list[str], *, ends_after: int | None = None, records: int | None = None) -> ScriptWatch:
    """The script under watch. Processes that train together record the same steps, so that none waits for another."""
    if count_beside() == 1 and not read_number():
        return ScriptWatch(words, ends_after=ends_after, records=records)
    return ScriptWatch(words, ends_after=ends_after, planned={*PLANNED, *([] if records is None else [records])})


def _run(report: str, trace: str, words: list[str], note: str, steps: int) -> None:
    watched, process, seen = _watch(words), os.getpid(), _Shown(report, steps)
    seen.begin()

    def end(number: int, frame: FrameType | None) -> None:
        # As without a handler: the script dies here, none of its `finally` runs. But first it is explained.
        del frame
        if os.getpid() == process:
            watched.exit_code = 128 + number
            seen.keep()
            name = signal.Signals(number).name
            write_report(watched, report, trace, seen=seen, ended_by=name, note=note)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    watched.run()
    if os.getpid() != process:
        os._exit(watched.exit_code)  # a fork of the script that came back here
    _say_ended()
    seen.end()
    seen.keep()
    write_report(watched, report, trace, seen=seen, note=note)
    sys.exit(watched.exit_code)


def _say_ended() -> None:
    """Tell that the silence which follows is not the script's."""
    if read_number() or sys.__stderr__ is None:
        return
    with contextlib.suppress(OSError, ValueError):  # a script may have closed it
        sys.__stderr__.write("floatline: the script has ended; what was seen of it is explained\n")
        sys.__stderr__.flush()


class _Shown:
    """What is held against FP32: losses and numbers that are read, written beside the report."""

    def __init__(self, report: str, steps: int) -> None:
        own = own_path(Path(report))
        self._log = LossLog(
            own.with_name(LOSSES), most=steps, ends=False, most_far=min(steps, WHOLE), measures=True, mark=STEPS
        )
        self._reads, self._path = ReadValues(), own.with_name(READS)
        self._patches = Patches()

    @property
    def search(self) -> list[list[int]]:
        return self._log.search

    @property
    def start_seconds(self) -> float:
        return self._log.start_seconds or 0.0

    def begin(self) -> None:
        self._remove = self._log.patch_bare(self._patches)
        self._reads.patch(self._patches)

    def end(self) -> None:
        self._remove()
        self._patches.undo()

    def keep(self) -> None:
        self._log.end()
        self._reads.write(self._path)


def write_report(
    watched: ScriptWatch,
    report: str,
    trace: str,
    *,
    seen: _Shown | None = None,
    ended_by: str = "",
    note: str = "",
    refused: Sequence[str] = (),
) -> None:
    """Explain what was seen so far, and write it down; the note stands after what was seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = watched.sum_up()
        content = explain(run, trace and str(own_path(Path(trace))))
    content["ended_by"], content["refused"] = ended_by, list(refused)
    content["search"] = [] if seen is None else _find_search(seen.search, run.record)
    content["start_seconds"] = 0.0 if seen is None else seen.start_seconds
    content["notes"] += [note] if note else []
    path = own_path(Path(report))
    path.with_suffix(".new").write_text(json.dumps(content), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def _find_search(search: list[list[int]], given: RunRecord) -> list[list[int]]:
    """The steps that each optimizer left out in the first half; of a single one also those that the loop left out."""
    by_hand = {event.step for event in given.of(ScalerStepEvent) if event.scaler == BY_HAND and not event.applied}
    if len(search) != 1 or not by_hand:
        return search
    return [sorted({*search[0], *(step for step in by_hand if step < _num_steps(given) // 2)})]


def explain(run: ScriptRun, trace_path: str) -> dict[str, Any]:
    """The findings about a run, as JSON."""
    given, capture = run.record, run.capture
    evidence = ScriptEvidence(
        make_target(""),
        0,
        given,
        stand_in_for_fp32(given),
        lambda _: None,
        captured=list(capture.steps),
        setup=capture.setup,
        evaluations=capture.evaluations,
    )
    findings = find_in_script(evidence, run.motion) if given.losses or given.exception else []
    quiet = not findings and not evidence.fails
    suspects = find_suspects(evidence) if quiet else []
    if findings and findings[0].cause.family == "not-precision":
        suspects = find_otherwise(evidence)
    beside = find_suspects_beside(evidence) if quiet else []
    sound = evidence.healthy if evidence.fails else evidence.captured
    traces = [*([evidence.setup] if evidence.setup else []), *(one.trace for one in sound)]
    candidates = find_candidates([*traces, *evidence.evaluations])
    decay = find_lost_decay(evidence, evidence.healthy[-1].trace) if quiet and evidence.healthy else None
    if trace_path and capture.steps:
        (evidence.found_in or capture.steps[-1].trace).save(trace_path)
    return {
        "precision": given.precision,
        "findings": [finding.as_json() for finding in findings],
        "suspects": [finding.as_json() for finding in suspects],
        "step_errors": measure_step_errors(one.trace for one in evidence.healthy),
        "suspects_beside": [finding.as_json() for finding in beside],
        "candidates": [finding.as_json() for finding in candidates],
        "notes": _notes(run),
        "lost_decay": None if decay is None else decay.as_json(),
        "unexplained": "" if findings else _say_unexplained(evidence, compiled=run.compiled),
        "unseen": _say_unseen(run),
        "fails_in_fp32": fails_in_fp32(evidence),
        "exception": "" if given.exception is None else f"{given.exception.kind}: {given.exception.message}",
        "last_line": run.last_line,
        "num_backward": len(given.losses),
        "num_steps": _num_steps(given),
        "first_bad_step": given.first_bad_step,
        "num_recorded": len(capture.steps),
        "num_ops": sum(len(one.trace.ops) for one in capture.steps),
        "work": _measure_work(capture.steps[-1].trace) if capture.steps else (0, 0),
        "is_narrow": _is_narrow(run),
        "fails": evidence.fails,
        "last_recorded": max((one.step for one in capture.steps), default=0),
        "exit_code": run.exit_code,
        "digests": run.digests,
        "bad_loss": _find_bad_loss(given),
    }


def _measure_work(trace: Trace) -> tuple[int, int]:
    """The operations of a step, and the elements that they make."""
    return len(trace.ops), sum(out.numel for op in trace.ops for out in op.outputs)


def _find_bad_loss(given: RunRecord) -> int | None:
    """The first step whose loss was not finite, whatever its gradients were."""
    pairs = zip(given.losses, given.loss_steps, strict=True)
    return next((step for loss, step in pairs if not math.isfinite(loss)), None)


def _is_narrow(run: ScriptRun) -> bool:
    """Whether anything was computed in 16 bits."""
    traces = [one.trace for one in run.capture.steps] + ([run.capture.setup] if run.capture.setup is not None else [])
    return run.record.precision not in ("", "fp32") or any(
        out.dtype in FORMATS for trace in traces for op in trace.ops for out in op.outputs
    )


def _num_steps(given: RunRecord) -> int:
    """Steps in which something went backward."""
    return len(set(given.loss_steps))


def _say_unseen(run: ScriptRun) -> str:
    """Why a run that looks healthy has no verdict: too few steps, or none that was looked into; '' where one was."""
    num = _num_steps(run.record)
    if num < _FEWEST:
        return f"{num} step{'s are' if num > 1 else ' is'} too few to tell"
    if run.capture.steps:
        return ""
    if run.capture.errors:
        return f"none of the {num:,} steps could be looked into: {run.capture.errors[0]}"
    return f"none of the {num:,} steps was looked into"


def _say_unexplained(evidence: ScriptEvidence, *, compiled: bool = False) -> str:
    given = evidence.given
    only_loss = given.bad_gradient is None and given.bad_weight is None
    if given.first_bad_step is not None and not (given.searches_in_loss and only_loss):
        text = f"loss, gradients or weights were not finite from step {given.first_bad_step} on"
        # An optimizer whose state is spoilt fails once more on healthy weights and gradients.
        tried = any(one.kind == "failed" and step_fails(one.trace) for one in evidence.captured)
        if not evidence.captured:
            return f"{text}, and none of the {_num_steps(given):,} steps could be recorded"
        if both := _find_in_both(evidence):
            return f"{text}: {both.name} at {Path(both.file).name}:{both.line} makes inf or NaN, and in FP32 as well"
        if compiled and not tried:
            return f"{text}, in compiled code; the same step was finite when it ran eagerly, so look at torch.compile"
        return f"{text}, and {'its recorded step does' if tried else 'the steps recorded afterwards do'} not tell why"
    if evidence.keeps_skipping:
        return (
            f"the scaler left out {len(given.skipped)} of {len(given.of(ScalerStepEvent))} steps, for an unknown cause"
        )
    return ""


def _find_in_both(evidence: ScriptEvidence) -> Op | None:
    """The first operation of a step that fails whose result is not finite, nor in FP32; None where there is none."""
    return next(
        (
            op
            for one in evidence.failed
            for op in one.trace.ops
            if op.line
            and any(out.nonfinite and out.twin_nonfinite for out in op.outputs)
            and not any(operand.value.nonfinite for operand in op.inputs)
        ),
        None,
    )


def _notes(run: ScriptRun) -> list[str]:
    capture, given = run.capture, run.record
    if not given.losses and not capture.steps:
        return list(dict.fromkeys(capture.errors))
    steps = ", ".join(str(one.step) for one in capture.steps)
    num_steps = _num_steps(given) or given.num_steps
    recorded = f"{len(capture.steps)} of {num_steps} steps recorded" + (f" (step {steps})" if steps else "")
    num_ops = sum(len(one.trace.ops) for one in capture.steps)
    beside = sum(len(trace.ops) for trace in capture.evaluations) + (len(capture.setup.ops) if capture.setup else 0)
    also = f"; and {beside:,} operation{'s' * (beside > 1)} in 16 bits before the first step and between steps"
    notes = [
        f"{recorded}, {num_ops:,} operations, {capture.seconds:.1f} s of {given.seconds:.1f} s{also * bool(beside)}",
        *dict.fromkeys(capture.errors),
    ]
    if capture.setup is not None and capture.setup.meta["left_out"]:
        notes.append(
            f"before the first pass, {len(capture.setup.ops):,} operations in 16 bits were looked at, and "
            f"{capture.setup.meta['left_out']:,} were not"
        )
    if run.compiled:
        notes.append("the script compiles its model: recorded steps ran eagerly, the others were seen from outside")
    if capture.ended_at is not None:
        notes.append(
            f"recording took {BUDGET:g} s by step {capture.ended_at}: healthy steps after it were not looked into"
        )
    if given.skipped and len(given.skipped) < len(given.of(ScalerStepEvent)):
        notes.append(f"the scaler left out {len(given.skipped)} of {len(given.of(ScalerStepEvent))} steps")
    return notes
