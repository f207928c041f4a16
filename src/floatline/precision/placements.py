"""Placements: in which dtypes each module of a model has its weights and computes under a plan, and why."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from floatline.plans import Plan
from floatline.plans.plan import is_match, name_modules
from floatline.precision.islands import Islands

_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
# Under autocast these compute in 16 bits, and these in FP32; the rest follow their inputs.
_PRODUCTS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_WIDE = (nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softplus, nn.modules.loss._Loss)


@dataclass(frozen=True)
class Placement:
    """Where one module ended up.

    Args:
        name: Its qualified name.
        weights: Formats of its own weights, with commas; '' where it has none.
        compute: Format it computes in, or 'as inputs'.
        reason: Why.
    """

    name: str
    weights: str
    compute: str
    reason: str


def place_modules(model: nn.Module, plan: Plan) -> list[Placement]:
    """Where a plan puts each module that has weights or no modules below it, and each island; nothing is changed.

    Args:
        model: The model, not wrapped.
        plan: The plan.
    """
    return _place(model, plan, dict.fromkeys(plan.check_modules(model), ""), cast=True)


def describe_plan(model: nn.Module, plan: Plan) -> str:
    """Where a plan puts each module of a model, and why: a table, with equal siblings in one line.

    Args:
        model: The model, not wrapped.
        plan: The plan.
    """
    return _draw(place_modules(model, plan), plan)


def describe_run(model: nn.Module, plan: Plan, islands: Islands) -> str:
    """The same for a run as it is now: with the weights that there are, and the islands that were added."""
    return _draw(_place(model, plan, islands.outputs, cast=False), plan)


def _place(model: nn.Module, plan: Plan, kept: Mapping[str, str], *, cast: bool) -> list[Placement]:
    modules = {"": model, **name_modules(model)}
    placed: list[Placement] = []
    for name, module in modules.items():
        if name in kept:
            # Islands in islands need no row of their own.
            if not any(name.startswith(f"{other}.") or (name and not other) for other in kept):
                placed.append(_place_island(name, module, plan, modules, cast=cast))
            continue
        if any(name.startswith(f"{island}.") or not island for island in kept):
            continue
        if any(True for _ in module.children()) and not any(True for _ in module.parameters(recurse=False)):
            continue
        compute, reason = _compute(module, plan)
        placed.append(Placement(name, _weights(module, plan) if cast else _actual(module), compute, reason))
    return placed


def _place_island(
    name: str, module: nn.Module, plan: Plan, modules: Mapping[str, nn.Module], *, cast: bool
) -> Placement:
    has_weights = any(True for _ in module.parameters())
    weights = ("fp32" if has_weights else "") if cast else _actual(module, recurse=True)
    return Placement(name, weights, "fp32", _why_island(name, plan, modules))


def _weights(module: nn.Module, plan: Plan) -> str:
    if not any(True for _ in module.parameters(recurse=False)):
        return ""
    return "fp32" if _has_statistics(module) else plan.weights


def _actual(module: nn.Module, *, recurse: bool = False) -> str:
    dtypes = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in module.parameters(recurse=recurse))
    return ", ".join(_NAMES.get(dtype, dtype) for dtype in dtypes)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None


def _why_island(island: str, plan: Plan, modules: Mapping[str, nn.Module]) -> str:
    for entry in plan.fp32_modules:
        if island and is_match(island, modules[island], entry.pattern):
            return f"kept: {entry.pattern}" + (f" ({entry.reason})" if entry.reason else "")
    return "raised during the run"


def _compute(module: nn.Module, plan: Plan) -> tuple[str, str]:
    if plan.compute == "fp32":
        return "fp32", "plan: compute"
    if not plan.mixed:
        if _has_statistics(module):
            return plan.compute, "weights and running statistics stay fp32: small moves would round to nothing"
        return plan.compute, "plan: weights and compute"
    if isinstance(module, _PRODUCTS):
        return plan.compute, "plan: compute"
    if isinstance(module, _WIDE):
        return "fp32", "autocast keeps it in fp32"
    return "as inputs", "autocast leaves it"


def _draw(placed: Sequence[Placement], plan: Plan) -> str:
    rows = [("module", "weights", "compute", "why")]
    rows += [(row.name or "(model)", row.weights or "-", row.compute, row.reason) for row in _group(placed)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
    ]
    lines += [_say(f"{kept.function}: in fp32", kept.reason) for kept in plan.fp32_functions]
    lines += [_say(f"{at.module or at.function}: {at.kind} rewritten", at.reason) for at in plan.rewrites]
    if plan.update is not None:
        lines.append(_say(f"update: {plan.update}", plan.reasons.get("update", "")))
    if plan.states is not None:
        lines.append(_say(f"states: {plan.states}", plan.reasons.get("states", "")))
    return "\n".join(lines)


def _say(text: str, reason: str) -> str:
    return f"{text} ({reason})" if reason else text


def _group(placed: Iterable[Placement]) -> list[Placement]:
    """Modules that differ in numbers alone, and ended up alike, as one row; exceptions keep rows of their own."""
    groups: dict[str, dict[tuple[str, str, str], list[Placement]]] = {}
    for row in placed:
        alike = groups.setdefault(_pattern(row.name), {})
        alike.setdefault((row.weights, row.compute, row.reason), []).append(row)
    found: list[Placement] = []
    for pattern, alike in groups.items():
        usual = max(alike.values(), key=len)
        for rows in alike.values():
            if rows is not usual or len(rows) == 1:
                found += rows
                continue
            others = " else" if len(alike) > 1 else ""
            first = rows[0]
            found.append(Placement(f"{pattern} ({len(rows)}{others})", first.weights, first.compute, first.reason))
    return found


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
