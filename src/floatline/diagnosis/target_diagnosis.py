"""diagnose: run a target as it is and in FP32, look into the step that fails, and name the cause."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from floatline.base.work_clock import WorkClock
from floatline.diagnosis.beside_fp32 import Beside, StepErrors, compare_with_fp32
from floatline.diagnosis.blame import Blame, Blamed, Line
from floatline.diagnosis.changed_runs import run_changed
from floatline.diagnosis.detectors.damage import find_candidates
from floatline.diagnosis.detectors.exceptions import find_exceptions, find_wrong_indices
from floatline.diagnosis.detectors.first_nonfinite import measure_step_errors
from floatline.diagnosis.detectors.learning import find_what_never_learns
from floatline.diagnosis.detectors.loop import find_loop_faults
from floatline.diagnosis.detectors.loss_scale import ScaleVerdict, judge_scale
from floatline.diagnosis.detectors.numbers import find_failures, find_silent_damage, name_zero_products
from floatline.diagnosis.detectors.operations import FORMATS
from floatline.diagnosis.evidence import Evidence
from floatline.diagnosis.fix_trials import try_fixes
from floatline.diagnosis.gaps import Shown
from floatline.diagnosis.headroom.step_rows import rows_of_diagnosis
from floatline.diagnosis.kernel_reproducer import write_kernel_reproducer
from floatline.diagnosis.result import Diagnosis
from floatline.diagnosis.trials.counterfactual import Counterfactuals, apply_scale, try_formats
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.numerics.cuda_autocast import cpu_autocast_lists
from floatline.probe.bundles.bundle import write_bundle
from floatline.probe.runs.conditions import Change
from floatline.probe.runs.failures import Failure
from floatline.probe.runs.records import RunRecord
from floatline.probe.runs.runs import run_target
from floatline.probe.trace.trace import Trace
from floatline.probe.watch.events import AutocastEvent
from floatline.probe.watch.patches import Patches
from floatline.running.nudge import Nudge
from floatline.workload import load_target

# Seconds after which no further replay begins; but every finding gets some time. What is tried is bounded by its
# number: the limit only ends a diagnosis that would take minutes, and then the answer says what was left out.
ENOUGH, LEAST = 90.0, 15.0
_SIXTEEN_BITS = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}


def diagnose(
    target: str,
    *,
    steps: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
    trace_path: str | None = None,
    bundle: str | None = None,
    with_data: bool = False,
    tries_fixes: bool = False,
    as_device: Literal["cuda", "cpu"] = "cuda",
) -> Diagnosis:
    """Name what a target's training suffers from, or say that nothing is wrong.

    The order: exceptions and calls of the loop; then, where something is not finite, whether FP32 fails too, and the
    operation at which inf or NaN begins; then damage that shows in no number but FP32's.

    Args:
        target: FILE.py, package.module, or either with :name.
        steps: Steps to run; None is 40 for a build() target, and train()'s own number.
        seed: Seed of every run.
        on_progress: Told what is done next.
        trace_path: Where to keep the trace of the step that was looked into.
        bundle: Folder to write that step to, so that it can be replayed elsewhere; it must not hold anything yet.
        with_data: Put the step's batch into the bundle, and the inputs of a wrong kernel with a script that calls it.
        tries_fixes: Whether changes of the source are tried: the target is then diagnosed again, in another process,
            with its line changed.
        as_device: Whose autocast a CPU follows, that of a GPU, or its own.

    Raises:
        TargetError: The target cannot be run, or ends in an exception that has nothing to do with precision.
    """
    began, clock = time.perf_counter(), WorkClock()
    say: Callable[[str], None] = on_progress or _say_nothing
    loaded = load_target(target)
    with warnings.catch_warnings(), cpu_autocast_lists() if as_device == "cpu" else contextlib.nullcontext():
        warnings.simplefilter("ignore")  # the target's own: they are not what was asked for
        say("running the target as it is")
        given = run_target(loaded, steps=steps, seed=seed)
        stuck = [finding for finding in find_exceptions(given, None) if finding.cause.id == "distributed-desync"]
        if stuck:  # in FP32 the processes would wait for each other just as long
            return Diagnosis(target, name_precision(given), tuple(stuck), time.perf_counter() - began)
        say("running it in FP32")
        fp32 = run_target(loaded, steps=steps, seed=seed, precision="fp32")
        evidence = Evidence(loaded, seed, given, fp32, say, steps)
        found = _find(evidence)
        trials = Counterfactuals(evidence, budget=max(LEAST, ENOUGH - clock.seconds))
        choice = trials.choose(found)
        scale = judge_scale(evidence, choice.findings, evidence.found_in, trials.measure_scale)
        findings = apply_scale(choice.findings, scale, evidence)
        tried = (*choice.tried, *_say_scale(scale, findings), *try_formats(evidence, findings, may_run=trials.may_try))
        if given.exception is not None and not findings:
            raise TargetError(_explain_unknown(target, given.exception, fp32.exception))
        if bundle is not None:
            step = evidence.found_in.meta["step"] if evidence.found_in else given.step_to_trace
            write_bundle(loaded, bundle, step=step, seed=seed, findings=findings, with_data=with_data)
            if with_data and evidence.found_in is not None:
                write_kernel_reproducer(evidence.found_in, Path(bundle) / "kernel", defined_in=given.file)
        if trace_path is not None:
            known = [trace for trace in evidence.traces.values() if trace is not None]
            trace = known[0] if known else evidence.trace(given.step_to_trace)
            if trace is not None:
                trace.save(trace_path)
        beside = Beside() if findings or evidence.fails else _look_beside(evidence)
        notes = (scale.text,) if scale is not None and not findings else ()
        notes = (*notes, beside.together) if beside.gap is not None and not beside.apart else notes
        if beside.apart:
            blamed = _blame_a_line(evidence, beside)
            notes = (*notes, blamed.note) if blamed.note else notes
            findings = [replace(one, seen=f"{one.seen}; {beside.apart}") for one in [blamed.finding] if one is not None]
    found_out = Diagnosis(
        target,
        name_precision(given),
        tuple(findings),
        time.perf_counter() - began,
        tried,
        notes,
        scale,
        chart=rows_of_diagnosis(_traces(evidence), findings[0] if findings else None),
        unexplained="" if findings else _explain_failure(evidence) or beside.apart,
        fails_in_fp32=evidence.fails_in_fp32,
        num_steps=len(set(given.loss_steps)),
        fp32_losses=tuple(fp32.losses),
    )
    if not tries_fixes:
        return found_out
    tried_out = try_fixes(
        found_out,
        lambda sources: run_changed_target(target, sources, steps=steps, seed=seed, as_device=as_device),
        root=Path.cwd(),
        say=say,
    )
    return replace(tried_out, seconds=time.perf_counter() - began)


def _explain_unknown(target: str, failure: Failure, in_fp32: Failure | None) -> str:
    """One line for an exception that no cause explains: such a run is neither healthy nor diagnosed."""
    place = f" at {Path(failure.file).name}:{failure.line}" if failure.file else ""
    first_line = next(iter(failure.message.splitlines()), "")
    same = in_fp32 is not None and in_fp32.kind == failure.kind
    blame = "FP32 raises it, too, so it is not precision" if same else "FP32 does not raise it, and no known cause fits"
    return (
        f"Target '{target}' raised {failure.kind}: {first_line}{place}, in step {failure.step}. {blame}. "
        "Run it alone to see the whole error."
    )


def _explain_failure(evidence: Evidence) -> str:
    """One line for a run that fails, where nothing that was recorded says why; '' for one that does not.

    A step that a scaler left out is no failure by itself: it may search.
    """
    given, in_fp32 = evidence.given, evidence.fp32.first_bad_step
    losses = zip(given.losses, given.loss_steps, strict=True)
    bad = [step for loss, step in losses if not math.isfinite(loss) and step not in given.skipped]
    bad += [step for step in (given.bad_gradient, given.bad_weight) if step is not None]
    if not bad:
        return ""
    seen = f"loss, gradients or weights are not finite from step {min(bad)} on"
    theirs = "in FP32 all stay finite" if in_fp32 is None else f"in FP32 from step {in_fp32} on"
    return f"{seen}, {theirs}, and no known cause was found in the recorded step"


def _look_beside(evidence: Evidence) -> Beside:
    """The losses of a run that nothing was found in, held against those of FP32."""
    given, fp32 = evidence.given, evidence.fp32
    traces = _own_traces(evidence)
    narrow = any(out.dtype in FORMATS for trace in traces for op in trace.ops for out in op.outputs)
    if evidence.fails_in_fp32 or (name_precision(given) == "fp32" and not narrow):
        return Beside()

    def run(nudge: float) -> Shown:
        if not nudge:
            return Shown(tuple(fp32.losses))
        evidence.on_progress("running it in FP32 from weights that are moved once by as much as BF16 rounds")
        patches = Patches()
        Nudge(nudge).patch(patches)
        try:
            nudged = run_target(evidence.target, steps=evidence.steps, seed=evidence.seed, precision="fp32")
        finally:
            patches.undo()
        return Shown(tuple(nudged.losses))

    errors = StepErrors(*measure_step_errors(traces))
    return compare_with_fp32(Shown(tuple(given.losses), tuple(given.skipped)), run, errors)


def _blame_a_line(evidence: Evidence, beside: Beside) -> Blamed:
    """What is to blame for losses that are apart from FP32's, after lines of the target ran in FP32."""

    def run(lines: Sequence[Line]) -> Shown | str:
        evidence.on_progress(f"running it with {len(lines)} line{'s' if len(lines) > 1 else ''} in FP32")
        change = Change(lines=tuple(lines), widens=True)
        seen = run_target(evidence.target, steps=evidence.steps, seed=evidence.seed, change=change)
        error = "" if seen.exception is None else seen.exception.kind
        return Shown(tuple(seen.losses), tuple(seen.skipped), error=error)

    return Blame(beside, Shown(tuple(evidence.fp32.losses)), run).find([], find_candidates(_own_traces(evidence)))


def _own_traces(evidence: Evidence) -> list[Trace]:
    """The recorded steps of the run as it is."""
    return [trace for (_, precision), trace in evidence.traces.items() if trace is not None and precision is None]


def name_precision(given: RunRecord) -> str:
    """What a run computes in: as its workload says, or by the weights and the autocast regions of the user's loop."""
    if given.precision:
        return given.precision
    weights = [] if given.model is None else [str(p.dtype) for p in given.model.parameters() if p.requires_grad]
    regions = [event.dtype for event in given.of(AutocastEvent) if event.enabled]
    for dtypes, kind in ((weights, "true"), (regions, "mixed")):
        for dtype in dtypes:
            if dtype in _SIXTEEN_BITS:
                return f"{_SIXTEEN_BITS[dtype]}-{kind}"
    return "fp32"


def _traces(evidence: Evidence) -> list[Trace]:
    """Of the run as it is, that of the findings first."""
    own = [evidence.found_in, *(trace for (_, precision), trace in evidence.traces.items() if precision is None)]
    return [trace for trace in own if trace is not None]


def _say_scale(scale: ScaleVerdict | None, findings: list[Finding]) -> tuple[str, ...]:
    return () if scale is None or not findings else (scale.text,)


def _say_nothing(_text: str) -> None:
    pass


def _find(evidence: Evidence) -> list[Finding]:
    for family in (
        lambda: find_exceptions(evidence.given, evidence.fp32),
        lambda: find_wrong_indices(evidence),
        lambda: name_zero_products(find_loop_faults(evidence.given, evidence.fp32), evidence),
        lambda: find_failures(evidence),
        lambda: find_silent_damage(evidence),
        lambda: find_what_never_learns(evidence),
    ):
        found = family()
        if found:
            return found
    return []


def run_changed_target(
    target: str,
    sources: Mapping[str, str],
    *,
    steps: int | None,
    seed: int,
    as_device: Literal["cuda", "cpu"] = "cuda",
) -> Diagnosis | str:
    """Diagnose a target in a process of its own, with changed texts.

    Args:
        target: As `diagnose` takes it.
        sources: Texts by path.
        steps: Steps to run.
        seed: Seed of every run.
        as_device: Whose autocast a CPU follows.
    """
    seen = run_changed(__name__, sources, target=target, steps=steps, seed=seed, as_device=as_device)
    if isinstance(seen, str):
        return seen
    if "error" in seen:
        return Diagnosis("it", "", (), 0.0, no_verdict=seen["error"])
    findings = tuple(Finding.read(entry) for entry in seen["findings"])
    return Diagnosis(
        "it", seen["precision"], findings, 0.0, notes=(seen["note"],), unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"], no_verdict=seen["no_verdict"], fp32_losses=tuple(seen["fp32_losses"]),
    )  # fmt: skip


def diagnose_changed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Diagnose a target whose source is taken to be another; in a process of its own."""
    found = diagnose(job["target"], steps=job["steps"], seed=job["seed"], as_device=job["as_device"])
    return {
        "precision": found.precision,
        "findings": [finding.as_json() for finding in found.findings],
        "unexplained": found.unexplained,
        "no_verdict": found.no_verdict,
        "fails_in_fp32": found.fails_in_fp32,
        "note": f"{_say_steps(found.num_steps)}, compared with FP32",
        "fp32_losses": list(found.fp32_losses),
    }


def _say_steps(num: int) -> str:
    """How many steps went without a finding, where that is known."""
    return f"{num:,} step{'s' if num > 1 else ''} without a finding" if num else "no finding"
