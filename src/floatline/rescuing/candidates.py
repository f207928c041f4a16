"""Candidate plans for what a diagnosis found, the most exact first, each with its reason. Pure; nothing is run."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floatline.findings import Finding
from floatline.fixes.code_fix import CodeFix
from floatline.plans import KeptFunction, KeptModule, Plan, Rewrite, Scaling
from floatline.plans.plan import REWRITE_KINDS, RewriteKind

if TYPE_CHECKING:
    from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
    from floatline.diagnosis.islands.island import Island

_OPTIMIZER = frozenset(["update-lost-to-rounding", "decay-lost-to-rounding", "optimizer-state-underflow"])
_GRADIENTS = frozenset(["gradient-underflow", "gradient-overflow"])
# A plan trains by floatline's loop: what only the user's own loop does wrong is not in it.
IN_THE_LOOP = frozenset(
    [
        *("clip-before-unscale", "fp16-params-with-scaler", "scaler-misuse", "scaler-state-lost"),
        *("scheduler-vs-skipped-step", "scaled-grad-in-penalty"),
    ]
)


@dataclass(frozen=True)
class FindingPlace:
    """Where a finding is, in the words of a plan.

    Args:
        finding: What was found.
        module: Its module; '' where it is in the root module's code, or outside of all modules.
        line: 'file.py:31'; '' where no line is known.
        function: 'file.py:Net.forward', the function around that line; '' where none is known.
        rewrite: The rewrite that fits the line; None where none does.
    """

    finding: Finding
    module: str = ""
    line: str = ""
    function: str = ""
    rewrite: RewriteKind | None = None


@dataclass(frozen=True)
class Candidate:
    """A plan to try.

    Args:
        plan: The plan.
        does: What it changes, in a few words.
        why: What speaks for it.
    """

    plan: Plan
    does: str
    why: str


def propose(
    base: Plan, places: Sequence[FindingPlace], *, island: Island | None = None, scale: ScaleVerdict | None = None
) -> tuple[Candidate, ...]:
    """Plans that may take the findings away, the most exact first; none where no plan can.

    Args:
        base: The workload's own plan.
        places: The findings and where they are, the primary cause first.
        island: The smallest FP32 island; None where none was searched.
        scale: What is known about the loss scale.
    """
    if not places or places[0].finding.cause.family == "not-precision" or base.compute == "fp32":
        return ()
    primary = places[0].finding.cause.id
    found: list[Candidate] = []
    if primary in _OPTIMIZER:
        found += _for_optimizer(base, places[0].finding)
    base = with_update(base)
    if primary in _GRADIENTS or primary in IN_THE_LOOP:
        found += _for_scale(base, places[0].finding, scale)
    if primary not in _OPTIMIZER and primary not in IN_THE_LOOP:
        found += _for_numbers(base, places, island)
    if base.weights != "fp32" and primary not in _OPTIMIZER:
        mixed = widen_weights(base, f"{primary}: {places[0].finding.seen}")
        wider = [Candidate(mixed, "FP32 weights", "16-bit weights and inputs are what is rounded")]
        wider += [Candidate(widen_weights(c.plan, ""), f"FP32 weights, {c.does}", c.why) for c in found]
        found += wider
    return _different(found)


def widen_weights(plan: Plan, why: str) -> Plan:
    """The same plan with FP32 weights, which take every update; FP16 then needs a loss scale."""
    scaling = plan.scaling or (Scaling() if plan.compute == "fp16" else None)
    return _change(
        plan, {"weights": "fp32", "update": None, "states": None, "scaling": scaling}, {"weights": why} if why else {}
    )


def with_update(base: Plan) -> Plan:
    """With 16-bit weights: torch's own optimizers round small updates away, and `floatline train` refuses them."""
    if base.weights == "fp32" or base.update is not None:
        return base
    return _change(base, {"update": "exact"}, {"update": "16-bit weights keep what rounding would drop"})


def with_own_scaling(base: Plan) -> Plan:
    """With every setting of the scale spelt out: a script's own scaler decides none of them."""
    return base if base.scaling is None else _change(base, {"scaling": _spell_out(base.scaling)}, {})


def _spell_out(scaling: Scaling) -> Scaling:
    """What a plan leaves open is a script's scaler to decide, which may be what is wrong."""
    return Scaling(**scaling.model_dump())


def _for_optimizer(base: Plan, finding: Finding) -> list[Candidate]:
    if base.weights == "fp32":
        return []
    scaling = base.scaling or (Scaling() if base.compute == "fp16" else None)
    exact = _change(base, {"update": "exact", "scaling": scaling}, {"update": finding.seen})
    why = f"{finding.cause.id}: {finding.seen}"
    return [
        Candidate(exact, "exact updates of the 16-bit weights", why),
        Candidate(widen_weights(base, finding.seen), "FP32 weights", why),
    ]


def _for_scale(base: Plan, finding: Finding, scale: ScaleVerdict | None) -> list[Candidate]:
    if base.compute != "fp16" or (scale is not None and scale.kind == "no-scale"):
        return []
    present = _spell_out(base.scaling or Scaling())
    best = None if scale is None else scale.recommended
    if scale is not None and best is not None and best > 0:
        start = min(max(best, 1.0), present.cap)
        scaling = present.model_copy(update={"init_scale": start, "floor": min(present.floor, start)})
        plan = _change(base, {"scaling": scaling}, {"scaling": scale.text})
        return [Candidate(plan, f"a loss scale that starts at {start:g}", scale.text)]
    plan = _change(base, {"scaling": present}, {"scaling": finding.seen})
    return [Candidate(plan, "floatline's own loss scaling", f"{finding.cause.id}: {finding.seen}")]


def _for_numbers(base: Plan, places: Sequence[FindingPlace], island: Island | None) -> list[Candidate]:
    first = places[0]
    why = f"{first.finding.cause.id}: {first.finding.seen}"
    found: list[Candidate] = []
    for place in places[:1]:
        found += _rewritten(base, place)
    if island is not None and island.members:
        said = "; ".join(m.reason for m in island.members if m.reason) or why
        found.append(_with_modules(base, island.kept, said, tf32=island.tf32))
    if island is not None and island.lines is not None:
        lines = [f"{_name(file)}:{line}" for file, line in island.lines.lines]
        found.append(_with_functions(base, lines, why))
    for place in places[:2]:
        found += [_with_functions(base, [place.line], _say(place))] if place.line else []
        found += [_with_modules(base, [_kept(place)], _say(place))] if place.module else []
    lines = list(dict.fromkeys(place.line for place in places if place.line))
    if len(lines) > 1:
        found.append(_with_functions(base, lines, why))
    if first.function:
        found.append(_with_functions(base, [first.function], why))
    found.append(_with_functions(base, ["loss"], why))
    together = _with_functions(base, [*lines, "loss"], why)
    if island is not None and island.members:
        plan = together.plan.model_copy(update={"fp32_modules": (*base.fp32_modules, *island.kept)})
        together = Candidate(plan, f"{', '.join(island.modules)} and {together.does}", why)
    places_of_lines = [(place.finding.file, place.finding.line) for place in places]
    if island is not None and island.lines is not None:
        places_of_lines += island.lines.lines
    return [_with_code(candidate, places_of_lines) for candidate in (*found, together)]


def _with_code(candidate: Candidate, lines: Iterable[tuple[str, int]]) -> Candidate:
    """The candidate with the code of its lines, so that a plan for a file that is edited later is not taken wrongly."""
    code = {f"{_name(file)}:{line}": linecache.getline(file, line).strip() for file, line in lines if file and line}
    kept = tuple(
        entry.model_copy(update={"code": code.get(entry.function, entry.code)})
        for entry in candidate.plan.fp32_functions
    )
    return replace(candidate, plan=candidate.plan.model_copy(update={"fp32_functions": kept}))


def _rewritten(base: Plan, place: FindingPlace) -> list[Candidate]:
    """The same function in another form: where the module is known there, else in the function, else in the loss."""
    if place.rewrite is None:
        return []
    found: list[Candidate] = []
    for where in ({"module": place.module}, {"function": place.function}, {"function": "loss"}):
        name = next(iter(where.values()))
        if name:
            entry = Rewrite(kind=place.rewrite, reason=_say(place), **where)
            plan = _change(base, {"rewrites": (*base.rewrites, entry)}, {})
            found.append(Candidate(plan, f"{place.rewrite} rewritten in {name}", _say(place)))
    return found


def _with_modules(base: Plan, kept: Collection[KeptModule], why: str, *, tf32: bool = False) -> Candidate:
    changes: dict[str, Any] = {"fp32_modules": (*base.fp32_modules, *kept)}
    reasons: dict[str, str] = {}
    if tf32:
        changes["tf32"], reasons["tf32"] = True, "The replayed steps agree with FP32 with products in TF32, too."
    plan = _change(base, changes, reasons)
    return Candidate(plan, f"{', '.join(k.pattern for k in kept)} in FP32", why)


def _with_functions(base: Plan, names: Sequence[str], why: str) -> Candidate:
    kept = tuple(KeptFunction(function=name, reason=why) for name in names)
    plan = _change(base, {"fp32_functions": (*base.fp32_functions, *kept)}, {})
    said = ["the loss" if name == "loss" else name for name in names]
    return Candidate(plan, f"{', '.join(said)} in FP32", why)


def _kept(place: FindingPlace) -> KeptModule:
    escaped = "".join(f"[{c}]" if c in "*?[" else c for c in place.module)
    return KeptModule(pattern=escaped, reason=_say(place))


def _change(base: Plan, fields: dict[str, Any], reasons: dict[str, str]) -> Plan:
    name = base.name if base.name.endswith("-rescued") else f"{base.name}-rescued"
    return base.model_copy(update={"name": name, **fields, "reasons": {**base.reasons, **reasons}})


def _different(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Without those that only say the same in other words."""
    kept: dict[str, Candidate] = {}
    for candidate in found:
        key = repr(_bare(candidate.plan.model_dump(exclude={"name", "reasons"})))
        kept.setdefault(key, candidate)
    return tuple(kept.values())


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if k != "reason"}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_bare(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _say(place: FindingPlace) -> str:
    return f"{place.finding.cause.id}: {place.finding.seen}"


def _name(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def locate(finding: Finding, fix: CodeFix | None, *, modules: Collection[str]) -> FindingPlace:
    """The place of a finding.

    Args:
        finding: What was found.
        fix: Its change of the code; None where none is known.
        modules: Names of the model's modules.
    """
    module = finding.module if finding.module in modules else ""
    rewrite = fix.kind if fix is not None and fix.kind in REWRITE_KINDS else None
    if not finding.file or not finding.line:
        return FindingPlace(finding, module, rewrite=rewrite)
    name = Path(finding.file).name
    function = name_function(Path(finding.file), finding.line)
    return FindingPlace(finding, module, f"{name}:{finding.line}", f"{name}:{function}" if function else "", rewrite)


def name_function(file: Path, line: int) -> str:
    """The innermost function that a line is in, such as 'Net.forward'; '' where it is in none."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    around = [(end - first, name) for name, first, end in _functions(tree, "") if first <= line <= end]
    return min(around)[1] if around else ""


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child.lineno, child.end_lineno or child.lineno
            # A plan names a function within another by its own name alone.
            yield from _functions(child, "")
        else:
            yield from _functions(child, prefix)
