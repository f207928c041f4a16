"""find_loop_faults: what the calls of a loop betray, without looking into a step."""

from __future__ import annotations

import ast
from pathlib import Path

from floatline.causes import find_cause
from floatline.diagnosis.detectors.not_trained import find_bad_data, find_untrained
from floatline.diagnosis.detectors.resuming import find_lost_scale, find_schedule_ahead, find_stale_weights
from floatline.diagnosis.detectors.scaler_order import find_clip_before_unscale, find_scaled_penalty, find_scaler_misuse
from floatline.findings import Finding
from floatline.probe.runs.records import RunRecord
from floatline.probe.watch.events import CastEvent, ScalerStepEvent

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
    return Finding(
        find_cause("fp16-params-with-scaler"),
        f"{len(names)} trainable parameters are float16 under an enabled GradScaler: {', '.join(names[:4])}"
        + (", …" if len(names) > 4 else ""),
        "for p in model.parameters(): p.data = p.data.float() if p.requires_grad else p.data  # before the optimizer",
        names[0] if names else "",
        place.file if place else "",
        place.line if place else 0,
        "torch.amp.GradScaler.unscale_",
    )
