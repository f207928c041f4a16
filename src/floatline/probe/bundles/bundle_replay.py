"""replay_bundle: the step of a bundle, run again as it was, as it is asked for, and in FP32 to compare with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floatline.errors import FloatlineError, ReplayError
from floatline.probe.bundles.bundle import Bundle, code_differs, open_target, read_bundle, restore_step
from floatline.probe.runs.runs import Change, replay_step
from floatline.probe.steps.captured_step import CapturedStep, Precision
from floatline.probe.steps.replayed import Agreement, Replay, compare_steps
from floatline.probe.trace.trace import Trace
from floatline.workload import Target


@dataclass(frozen=True)
class ReplayRow:
    """One replay of the step.

    Args:
        what: 'as it was', or what was done otherwise.
        loss: NaN where it raised before there was one.
        finite: Whether the loss and all gradients are finite.
        scale: The loss scale; None where the user's loop sets it.
        gradient_norm: Of the unscaled gradients; None where it is not known.
        agreement: Of the gradients with FP32's; None where there is nothing to compare.
        worst: The parameter that agrees least.
        error: What it raised; '' where it did not.
    """

    what: str
    loss: float = math.nan
    finite: bool = False
    scale: float | None = None
    gradient_norm: float | None = None
    agreement: Agreement | None = None
    worst: str = ""
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Its fields, for programs."""
        own = self.agreement
        agreement = own and {
            "cosine": own.cosine,
            "norm_ratio": own.norm_ratio,
            "lost_share": own.lost_share,
            "largest_error": own.largest_error,
            "worst_parameter": self.worst,
        }
        return {
            "what": self.what,
            "loss": self.loss,
            "finite": self.finite,
            "scale": self.scale,
            "gradient_norm": self.gradient_norm,
            "against_fp32": agreement,
            "error": self.error,
        }


@dataclass(frozen=True)
class ReplayReport:
    """What the replays of a bundle gave.

    Args:
        bundle: The bundle.
        target: The target that was run.
        rows: The step as it was, as asked, and in FP32.
        asked: Place of the row that was asked for.
        notes: What is not as it was when the bundle was written.
    """

    bundle: Bundle
    target: str
    rows: tuple[ReplayRow, ...]
    asked: int
    notes: tuple[str, ...]

    @property
    def finite(self) -> bool:
        """Whether the replay that was asked for is."""
        return self.rows[self.asked].finite

    def as_json(self) -> dict[str, Any]:
        """One object for programs."""
        origin = self.bundle.origin
        return {
            "bundle": str(self.bundle.folder),
            "target": self.target,
            "step": origin.step,
            "seed": origin.seed,
            "plan": None if self.bundle.plan is None else self.bundle.plan.name,
            "finite": self.finite,
            "replays": [row.as_json() for row in self.rows],
            "findings": self.bundle.findings,
            "versions": self.bundle.versions,
            "notes": list(self.notes),
        }


def replay_bundle(
    folder: str | Path,
    *,
    target: str | None = None,
    precision: Precision | None = None,
    scale: float | None = None,
    islands: Sequence[str] = (),
    trace_path: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ReplayReport:
    """Open a bundle and run its step again.

    Args:
        folder: The bundle.
        target: What builds its model; None takes the one that it names.
        precision: What to compute in; None leaves it.
        scale: Another loss scale; None leaves it.
        islands: Modules to compute in FP32.
        trace_path: Where to keep the trace of the replay that was asked for.
        on_progress: Told what is done next.

    Raises:
        ReplayError: The bundle cannot be read, or is not of that target.
        TargetError: The target cannot be loaded or built.
    """
    bundle = read_bundle(folder)
    loaded = open_target(bundle, target)
    notes = _compare_code(bundle, loaded)
    say: Callable[[str], None] = on_progress or (lambda _: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the target's own
        if bundle.kind == "train":
            run = _train_runner(bundle, loaded, scale)
            notes.append(f"the target is run again from seed {bundle.origin.seed} to step {bundle.origin.step}")
        else:
            run = _step_runner(restore_step(bundle, loaded))
            if not bundle.has_data:
                notes.append("the bundle holds no data: the batch is the target's own")
        how = _describe(precision, scale, islands)
        tries: list[tuple[str, dict[str, Any]]] = [("as it was", {})]
        if how not in ("", "fp32"):
            tries.append((how, {"precision": precision, "scale": scale, "islands": islands}))
        tries.append(("fp32", {"precision": "fp32"}))
        traced = {"": 0, "fp32": len(tries) - 1}.get(how, 1)
        rows: list[tuple[ReplayRow, Replay | None]] = []
        for number, (what, options) in enumerate(tries):
            say(f"replaying the step {what}" if what == "as it was" else f"replaying the step: {what}")
            rows.append(run(what, options, trace_path if number == traced else None))
    reference = rows[-1][1]
    compared = [_with_agreement(row, replay, reference) for row, replay in rows[:-1]]
    return ReplayReport(bundle, loaded.text, (*compared, rows[-1][0]), traced, tuple(notes))


_Runner = Callable[[str, dict[str, Any], str | None], "tuple[ReplayRow, Replay | None]"]


def _step_runner(step: CapturedStep) -> _Runner:
    def run(what: str, options: dict[str, Any], trace_path: str | None) -> tuple[ReplayRow, Replay | None]:
        try:
            replay = step.replay(**options, trace=trace_path is not None)
        except FloatlineError:
            raise
        except Exception as error:  # the user's own: it is what there is to see
            return ReplayRow(what, error=_one_line(error)), None
        _keep(replay.trace, trace_path)
        row = ReplayRow(what, replay.loss, replay.finite, replay.scale, replay.gradient_norm)
        return row, replay

    return run


def _train_runner(bundle: Bundle, target: Target, scale: float | None) -> _Runner:
    """A train() function is run from its seed to the step: its loop is the only one who knows what a step is."""
    if scale is not None:
        raise ReplayError(
            f"Target '{target.text}' scales its loss itself. Leave out --scale, or give a build() target."
        )

    def run(what: str, options: dict[str, Any], trace_path: str | None) -> tuple[ReplayRow, Replay | None]:
        precision = options.get("precision")
        if precision == "fp16":
            raise ReplayError(
                f"Target '{target.text}' has only train(), which is replayed in fp32 or bf16, or as it is."
            )
        change = Change(islands=tuple(options.get("islands", ())))
        origin = bundle.origin
        record, trace = replay_step(target, step=origin.step, seed=origin.seed, precision=precision, change=change)
        _keep(trace, trace_path)
        if record.exception is not None:
            failure = record.exception
            return ReplayRow(what, error=f"{failure.kind}: {failure.message.partition(chr(10))[0]}"), None
        losses = [loss for loss, at in zip(record.losses, record.loss_steps, strict=True) if at == origin.step]
        finite = all(map(math.isfinite, losses)) and not any(g.value.nonfinite for g in trace.gradients.values())
        return ReplayRow(what, sum(losses) / len(losses) if losses else math.nan, finite and bool(losses)), None

    return run


def _with_agreement(row: ReplayRow, replay: Replay | None, reference: Replay | None) -> ReplayRow:
    if replay is None or reference is None:
        return row
    found = compare_steps(replay, reference)
    worst = found.worst[0] if found.worst else ""
    return ReplayRow(row.what, row.loss, row.finite, row.scale, row.gradient_norm, found.whole, worst, row.error)


def _describe(precision: str | None, scale: float | None, islands: Sequence[str]) -> str:
    parts = [precision or ""]
    parts += [] if scale is None else [f"scale {scale:g}"]
    parts += [f"{', '.join(islands)} in FP32"] if islands else []
    return ", ".join(part for part in parts if part)


def _compare_code(bundle: Bundle, target: Target) -> list[str]:
    if not code_differs(bundle, target):
        return []
    name = bundle.origin.file or "its target"
    return [f"the code of {name} is not what it was when the bundle was written"]


def _keep(trace: Trace | None, path: str | None) -> None:
    if trace is not None and path is not None:
        trace.save(path)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
