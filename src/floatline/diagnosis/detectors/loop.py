"""find_loop_faults: what a loop's calls, optimizers and batches betray, without looking into a step."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path

from floatline.causes import find_cause
from floatline.diagnosis.detectors.resuming import find_lost_scale, find_schedule_ahead, find_stale_weights
from floatline.diagnosis.detectors.scaler_order import find_clip_before_unscale, find_scaled_penalty, find_scaler_misuse
from floatline.findings import Finding
from floatline.probe.runs.records import OptimizerRecord, RunRecord, Untrained
from floatline.probe.watch.events import CastEvent, ForwardEvent, ReplaceEvent, ScalerStepEvent, StepEvent


def find_loop_faults(given: RunRecord, fp32: RunRecord | None, *, fp32_learns: bool = False) -> list[Finding]:
    """Faults in the use of scaler, optimizer, scheduler, autocast and data, the most certain first.

    Args:
        given: The run as it is.
        fp32: The same run in FP32; None where there is none, and then what needs it is not judged.
        fp32_learns: Where there is none, whether something else says that FP32 would do better.
    """
    return [
        *find_scaler_misuse(given),
        *find_clip_before_unscale(given, fp32),
        *find_scaled_penalty(given),
        *_find_half_parameters(given),
        *find_lost_scale(given),
        *find_schedule_ahead(given, fp32),
        *find_stale_weights(given, fp32),
        *find_untrained(given, fp32, fp32_learns=fp32_learns),
        *find_bad_data(given, fp32),
    ]


def _find_half_parameters(given: RunRecord) -> list[Finding]:
    """FP16 parameters under a scaler that did not raise: an optimizer that unscales by itself."""
    if not given.half_parameters or given.exception is not None:
        return []
    return [describe_half_parameters(given)]


def describe_half_parameters(given: RunRecord) -> Finding:
    """The finding that names the FP16 parameters."""
    names = given.half_parameters
    casts = given.of(CastEvent)
    attempt = next(iter(given.of(ScalerStepEvent)), None)
    place = casts[-1] if casts else attempt
    cause = find_cause("fp16-params-with-scaler")
    return Finding(
        cause,
        f"{len(names)} trainable parameters are float16 under an enabled GradScaler: {', '.join(names[:4])}"
        + (", …" if len(names) > 4 else ""),
        cause.advice,
        names[0] if names else "",
        place.file if place else "",
        place.line if place else 0,
        "torch.amp.GradScaler.unscale_",
    )


def find_untrained(given: RunRecord, fp32: RunRecord | None, *, fp32_learns: bool = False) -> list[Finding]:
    """Optimizers that hold old or unused parameters, and tensors of the loss that none holds.

    Args:
        given: The run as it is.
        fp32: The same run in FP32; None where there is none.
        fp32_learns: Where there is none, whether something else says that FP32 would do better.
    """
    if given.exception is not None:
        return []  # what did not come to its end proves nothing about the rest
    attempts = [event.applied for event in given.of(ScalerStepEvent)]
    if attempts and not any(attempts):
        return []  # nothing trains where every step is left out, whoever holds it
    return _find_idle(given) or _find_unheld(given, fp32_learns if fp32 is None else not _stands_still(fp32))


def _find_idle(given: RunRecord) -> list[Finding]:
    """An optimizer that is stepped again and again without one gradient."""
    idle = [o for o in given.optimizers if o.num_idle >= 2 and o.num_idle >= o.num_steps and not o.dead]
    if not idle:
        return []
    optimizer = idle[0]
    event = next((e for e in given.of(StepEvent, ScalerStepEvent) if e.optimizer == optimizer.number), None)
    name = shared_prefix(optimizer.names)
    return [
        Finding(
            find_cause("params-not-trained"),
            f"{optimizer.name} was stepped {optimizer.num_idle} times and none of its {len(optimizer.names)} "
            "parameters ever had a gradient",
            f"Let the loss reach {name or 'its parameters'}, without detach, or step it only where it has gradients.",
            name,
            event.file if event else optimizer.file,
            event.line if event else optimizer.line,
            optimizer.call,
        )
    ]


def _find_unheld(given: RunRecord, fp32_learns: bool) -> list[Finding]:
    unheld = [tensor for tensor in given.untrained if not tensor.held]
    starved = [tensor for tensor in given.untrained if tensor.held]
    dead = [optimizer for optimizer in given.optimizers if optimizer.dead]
    hidden = [tensor for tensor in unheld if not tensor.registered]
    if unheld and dead:
        name = shared_prefix([tensor.name for tensor in unheld])
        seen = (
            f"{dead[0].name} holds {sum(not n for n in dead[0].names)} tensors that the model does not have, and "
            f"{len(unheld)} parameters of the model with gradients, {_list(unheld)}, are in no optimizer"
        )
        fix = "Make the optimizer after the last change of the model."
        changes = [e for e in given.of(ReplaceEvent) if e.name in name.split(".")]
        if changes:
            place = changes[-1]
            return [Finding(find_cause("params-not-trained"), seen, fix, name, place.file, place.line, dead[0].name)]
        return [_finding(dead[0], name, seen, fix)]
    if hidden and given.optimizers:
        name = shared_prefix([tensor.name for tensor in hidden])
        seen = f"{_list(hidden)} gets gradients but is a plain attribute: model.parameters() does not have it"
        fix = f"Make {name or 'them'} parameters: torch.nn.Parameter, or a ModuleList, ParameterList or ParameterDict."
        if all(tensor.moved for tensor in hidden):
            fix = "Move the tensor first: torch.nn.Parameter(x.to(device)). What .to() makes of a parameter is none."
        return [_finding(given.optimizers[0], name, seen, fix)]
    # A frozen backbone is often left out on purpose. Only a run that learns nothing makes it a fault.
    if fp32_learns or not _stands_still(given):
        return []
    if unheld and given.optimizers:
        name = shared_prefix([tensor.name for tensor in unheld])
        seen = (
            f"{len(unheld)} parameters with gradients, {_list(unheld)}, are in no optimizer, and the loss stands still"
        )
        fix = f"Give {f'the parameters of {name}' if name else 'these parameters'} to the optimizer."
        return [_finding(given.optimizers[0], name, seen, fix)]
    if starved and given.optimizers:
        name = shared_prefix([tensor.name for tensor in starved])
        seen = f"{len(starved)} parameters, {_list(starved)}, are used and held by the optimizer but get no gradient"
        return [
            _finding(
                given.optimizers[0], name, seen, f"Let the loss reach {name or 'them'}, without detach or no_grad."
            )
        ]
    return []


def _stands_still(record: RunRecord) -> bool:
    losses = record.losses
    size = max(len(losses) // 5, 1)
    first, last = sum(losses[:size]) / size, sum(losses[-size:]) / size
    return len(losses) >= 8 and math.isfinite(last) and last > first - 0.1 * abs(first)


def _finding(optimizer: OptimizerRecord, name: str, seen: str, fix: str) -> Finding:
    cause = find_cause("params-not-trained")
    return Finding(cause, seen, fix, name, optimizer.file, optimizer.line, optimizer.name)


def _list(tensors: Sequence[Untrained]) -> str:
    names = list(dict.fromkeys(tensor.name for tensor in tensors))
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def shared_prefix(names: Sequence[str]) -> str:
    """The module that all names lie in; the name itself where there is one only."""
    known = sorted({name for name in names if name})
    if len(known) == 1:
        owner, _, last = known[0].rpartition(".")
        return owner if last in ("weight", "bias") and owner else known[0]
    parts = [name.split(".") for name in known]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ".".join(parts[0][:shared]) if parts else ""


def find_bad_data(given: RunRecord, fp32: RunRecord | None) -> list[Finding]:
    """A batch that is not finite, where FP32 breaks at that batch too."""
    judge = fp32 or given
    broken = judge.first_bad_step
    if broken is None:
        return []
    cause = find_cause("bad-input-data")
    for tensor in given.bad_tensors:
        if tensor.batch != broken % max(given.num_batches, 1):
            continue
        counts = f"{tensor.num_nan} NaN and {tensor.num_inf} inf in {tensor.numel} values"
        seen = f"{tensor.name} holds {counts}; in FP32 step {broken}, the first with this batch, is not finite either"
        return [
            Finding(
                cause,
                seen,
                cause.advice,
                tensor.name,
                op="input",
            )
        ]
    if given.kind == "build":
        return []
    first = next((e for e in judge.of(ForwardEvent) if e.step == broken), None)
    if first is None or not first.bad_inputs:
        return []
    seen = f"the input of the model at step {broken} holds NaN or inf"
    seen += "" if fp32 is None else ", and the step is not finite in FP32 either"
    fix = cause.advice
    return [Finding(cause, seen, fix, given.entry, first.file, first.line, "input")]


_COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "broadcast",
        "reduce",
        "reduce_scatter",
        "barrier",
        "all_to_all",
    ]
)


def find_collective(file: str) -> tuple[str, int]:
    """A collective that a conditional `continue`, `break` or `return` in its loop jumps over, and that jump's line.

    What other processes do cannot be seen from here; the source can. ('', 0) where it shows no such call.

    Args:
        file: Source file of the target.
    """
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return "", 0
    for loop in ast.walk(tree):
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        jumps = [jump for branch in loop.body if isinstance(branch, ast.If) for jump in _find_jumps(branch)]
        after = [call for call in _find_calls(loop) if jumps and call[1] > jumps[0]]
        if after:
            return after[0][0], jumps[0]
    calls = _find_calls(tree)
    return calls[0] if calls else ("", 0)


def _find_jumps(branch: ast.If) -> list[int]:
    return [n.lineno for n in ast.walk(branch) if isinstance(n, (ast.Continue, ast.Break, ast.Return))]


def _find_calls(tree: ast.AST) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _COLLECTIVES:
                found.append((name, node.lineno))
    return sorted(found, key=lambda call: call[1])
