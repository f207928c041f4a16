"""diagnose_forward: a target with `forward(seed)`, diagnosed, and changes of its source tried on the outputs."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline.diagnosis.changed_runs import run_changed
from floatline.diagnosis.fix_trials import try_fixes
from floatline.diagnosis.forward.evidence import run_arm, settle_formats
from floatline.diagnosis.forward.forward_diagnosis import diagnose_captured
from floatline.diagnosis.forward.result import ForwardDiagnosis, say_percent
from floatline.diagnosis.islands.errors import OUTPUTS
from floatline.diagnosis.result import Diagnosis
from floatline.errors import TargetError
from floatline.findings import Finding
from floatline.probe.steps.captured_forward import CapturedForward, capture_forward
from floatline.probe.steps.outputs import find_logits, match_output
from floatline.workload import load_target


def diagnose_forward(
    target: str,
    *,
    seed: int = 0,
    searches: bool = True,
    on_progress: Callable[[str], None] | None = None,
    trace_path: str | None = None,
    tries_fixes: bool = False,
) -> ForwardDiagnosis:
    """Say whether a model that is not trained may run in 16 bits, and what breaks it.

    Args:
        target: FILE.py or package.module with `forward(seed)`, or either with :name. It returns `(model, inputs)`, or
            `(model, inputs, precision)`; the precision is 'fp16-true' unless given.
        seed: Handed to it where it takes one, and torch's seed before.
        searches: Whether the smallest FP32 island is looked for.
        on_progress: Told what is done next.
        trace_path: Where to keep the trace of the pass.
        tries_fixes: Whether changes of the source are tried: the target is then diagnosed again, in another process.

    Raises:
        TargetError: The target cannot be called, gives something else, or FP32 fails with an exception.
    """
    began = time.perf_counter()
    step = capture_target(target, seed)
    found = diagnose_captured(step, target, searches=searches, on_progress=on_progress, trace_path=trace_path)
    if tries_fixes:
        found = try_forward_fixes(found, step, seed=seed, on_progress=on_progress or (lambda _: None))
    return replace(found, seconds=time.perf_counter() - began)


def capture_target(target: str, seed: int) -> CapturedForward:
    """The forward pass that a target gives, kept to be run again.

    Raises:
        TargetError: The target cannot be called, or gives something else.
    """
    model, inputs, precision = call_forward(target, seed)
    return capture_forward(model, inputs, plan=precision)


def call_forward(target: str, seed: int) -> tuple[Any, Any, str]:
    """What a target with `forward(seed)` gives: the model, its inputs, and the precision that is asked about.

    Raises:
        TargetError: The target cannot be called, or gives something else.
    """
    place, _, name = target.rpartition(":")
    named = bool(place) and name.isidentifier()
    return _take(load_target(target if named else f"{target}:forward").call(seed), target)


def _take(made: object, target: str) -> tuple[Any, Any, str]:
    row = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else []
    if len(row) not in (2, 3) or not callable(row[0]):
        name = type(cast(object, made)).__name__
        raise TargetError(
            f"Target '{target}': it returned {name}. It must return (model, inputs), or (model, inputs, precision)."
        )
    return row[0], row[1], str(row[2]) if len(row) > 2 else "fp16-true"


def try_forward_fixes(
    found: ForwardDiagnosis, step: CapturedForward, *, seed: int, on_progress: Callable[[str], None]
) -> ForwardDiagnosis:
    """The diagnosis of a target with a change of its source that makes it healthy; or with what was tried.

    A change holds where 16 bits are healthy with it, and FP32's outputs are what they were.

    Args:
        found: As it was found.
        step: The pass that it was found in.
        seed: That of the target.
        on_progress: Told what is tried.
    """
    if found.primary is None:
        return found
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        kept = Path(folder, "outputs.safetensors")
        save_file(_compute_fp32(step), kept)

        def run(sources: Mapping[str, str]) -> Diagnosis | str:
            seen = run_changed(__name__, sources, target=found.target, seed=seed, kept=str(kept))
            return seen if isinstance(seen, str) else _read(seen)

        return cast("ForwardDiagnosis", try_fixes(found, run, root=Path.cwd(), say=on_progress))


def diagnose_changed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Diagnose a target whose source is taken to be another; in a process of its own."""
    step = capture_target(job["target"], job["seed"])
    found = diagnose_captured(step, job["target"], searches=False)
    worst = found.outputs[0].worst
    return {
        "precision": found.precision,
        "findings": [finding.as_json() for finding in found.findings],
        "unexplained": found.unexplained or _compare_fp32(step, job["kept"]),
        "no_verdict": found.no_verdict,
        "fails_in_fp32": found.fails_in_fp32,
        "note": f"its outputs are {say_percent(math.inf if worst is None else worst.distance)} off FP32's",
    }


def _read(seen: Mapping[str, Any]) -> Diagnosis:
    if "error" in seen:
        return Diagnosis("it", "", (), 0.0, no_verdict=seen["error"])
    findings = tuple(Finding.read(entry) for entry in seen["findings"])
    return Diagnosis(
        "it", seen["precision"], findings, 0.0, notes=(seen["note"],), unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"], no_verdict=seen["no_verdict"],
    )  # fmt: skip


def _compute_fp32(step: CapturedForward) -> dict[str, Tensor]:
    settle_formats(step)
    made = run_arm(step, "fp32").replay
    return {} if made is None else {name: tensor.contiguous().clone() for name, tensor in made.raw.items()}


def _compare_fp32(step: CapturedForward, kept: str) -> str:
    """What a change does to FP32's outputs; '' where they are what they were, but for rounding."""
    before, after = load_file(kept), _compute_fp32(step)
    logits = find_logits(step.model, before)
    for name, tensor in before.items():
        if name not in after:
            return f"the output {name} is gone"
        off = match_output(name, after[name], tensor, logits=name in logits).distance
        if not off <= OUTPUTS.whole:
            return f"it changes what FP32 computes: the output {name} is {say_percent(off)} off what it was"
    return ""
