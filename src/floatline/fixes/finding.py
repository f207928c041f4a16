"""From a finding to a change of the line that it names, where a rewrite for it is known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper

from floatline.findings import Finding
from floatline.fixes.code_fix import CodeFix
from floatline.fixes.expressions import FixContext
from floatline.fixes.kinds import EXPRESSIONS, ONLY_FOR_FINDINGS, SPANS, STATEMENTS, FixKind
from floatline.fixes.names import read_names
from floatline.fixes.origins import ConstantReader, find_numbers, find_origins
from floatline.fixes.rewriting import Exchange, Put, Replace
from floatline.fixes.scope import LinePlace, find_made, find_positions, find_sources, find_statement, find_steps
from floatline.fixes.spanning.edits import FileScene

_LOGS: tuple[FixKind, ...] = ("log-sigmoid", "log-softmax", "softplus", "bce-with-logits")
_WEIGHTS: tuple[FixKind, ...] = ("mixed-precision", "trainer-precision", "fp32-weights", "autocast-forward")
_FLOATS: tuple[FixKind, ...] = ("float-operands", "float-and-back")
_REGIONS: tuple[FixKind, ...] = ("fp32-island", "fp32-function")
# What is tried for each cause, in this order.
KINDS_OF_CAUSES: dict[str, tuple[FixKind, ...]] = {
    "scalar-out-of-range": ("mask-constant", "small-mask", "mask-sum"),
    "rounded-onto-singularity": (*_LOGS, *_FLOATS, "buffer-keeps-dtype", *_REGIONS),
    "exp-overflow": ("exp-ratio", "softplus", "log-softmax", *_FLOATS, "fp32-function"),
    "eps-underflow": ("log-sigmoid", "small-eps", *_FLOATS, "fp32-function"),
    "activation-overflow": (*_FLOATS, "fp32-island", "fp32-loop", "fp32-function"),
    "input-out-of-range": ("fp32-first", "fp32-island"),
    "reduction-overflow": (*_FLOATS, "fp32-function"),
    "product-overflow": (*_FLOATS, "fp32-island", "fp32-loop", "fp32-function"),
    "gradient-overflow": ("scale-back-off", *_LOGS, "exp-ratio", *_FLOATS),
    "gradient-underflow": ("scaler-with-autocast", "add-scaler", "mixed-precision", "autocast-forward"),
    "optimizer-state-underflow": ("fp32-state", *_WEIGHTS),
    **dict.fromkeys(("update-lost-to-rounding", "decay-lost-to-rounding"), _WEIGHTS),
    "cancellation": ("two-pass-variance", *_FLOATS, *_REGIONS),
    "accumulator-stagnation": ("float-operands",),
    "integer-not-exact": (*_FLOATS, "fp32-cast", *_REGIONS),
    **dict.fromkeys(("changed-in-16-bits", "choice-flipped"), (*_FLOATS, "fp32-cast", *_REGIONS)),
    "eps-too-large": ("fp32-eps",),
    "unsupported-half-op": ("bce-with-logits", *_FLOATS),
    "autocast-region-misuse": ("bce-with-logits", "float-input", "source-dtype", "write-dtype", "product-dtype"),
    "dtype-mismatch": ("source-dtype", "write-dtype", "product-dtype", "input-dtype"),
    "clip-before-unscale": ("clip-in-framework", "unscale-all", "unscale-before-clip"),
    "scaler-misuse": (
        "unscale-once",
        "step-through-scaler",
        "update-after-step",
        "backward-in-framework",
        "scale-backward",
        "unscale-by-scaler",
        "clear-always",
        "divide-by-scale",
    ),
    "scaler-state-lost": ("scaler-state", "one-scaler"),
    "fp16-params-with-scaler": _WEIGHTS,
    "scheduler-vs-skipped-step": ("schedule-after-step",),
    "scaled-grad-in-penalty": ("unscaled-penalty",),
    "params-not-trained": ("bare-parameter",),
    "singular-gradient": ("vector-norm", "double-where"),
    "fully-masked-softmax": ("mask-constant",),
    "empty-reduction": ("mean-of-some",),
    "clamp-kills-gradient": ("no-clamp",),
}
# What is tried before that at the statements that made the names of the line.
KINDS_OF_SOURCES: dict[str, tuple[FixKind, ...]] = {
    "cancellation": ("two-pass-variance",),
    "accumulator-stagnation": ("fp32-cast",),
    "fully-masked-softmax": ("mask-constant",),
}
# What is tried after that at the statements that the names of the line come from, in the whole file.
KINDS_OF_ORIGINS: dict[str, tuple[FixKind, ...]] = {
    **dict.fromkeys(("update-lost-to-rounding", "decay-lost-to-rounding", "fp16-params-with-scaler"), _WEIGHTS),
    "optimizer-state-underflow": ("fp32-state", *_WEIGHTS),
    "eps-too-large": ("fp32-eps",),
    **dict.fromkeys(
        (
            "rounded-onto-singularity", "cancellation", "accumulator-stagnation", "integer-not-exact", "eps-underflow",
            "changed-in-16-bits", "choice-flipped",
        ),
        ("fp32-cast",),
    ),
}  # fmt: skip
# What is tried last at the steps of the same function.
KINDS_OF_STEPS: dict[str, tuple[FixKind, ...]] = {"scaler-misuse": ("update-after-step", "step-through-scaler")}
KINDS_OF_FINDINGS: tuple[FixKind, ...] = tuple(
    {kind: None for kinds in KINDS_OF_CAUSES.values() for kind in kinds if kind not in ONLY_FOR_FINDINGS}
)
_NOT_SAFE = ("step-through-scaler", "schedule-after-step", "update-after-step")
_OPS = {"linalg_vector_norm": "norm", "vector_norm": "norm", "square": "pow", "rsub": "sub", "true_divide": "div"}


def fix_finding(finding: Finding, *, root: str | Path | None = None) -> CodeFix | None:
    """The change of the user's source that takes a finding away; None where no rewrite is known.

    Args:
        finding: With file and line.
        root: Folder that the patch is applied in; None is the file's own.
    """
    return next(find_fixes(finding, root=root), None)


def find_fixes(finding: Finding, *, root: str | Path | None = None, text: str | None = None) -> Iterator[CodeFix]:
    """Every change of the user's source that may take a finding away, the most exact first.

    Args:
        finding: With file and line.
        root: Folder that the patch is applied in; None is the file's own.
        text: What the file is taken to hold; None reads it.
    """
    kinds = KINDS_OF_CAUSES.get(finding.cause.id, ())
    if not (finding.file and finding.line and kinds):
        return
    origin = finding.origin
    if origin is not None:  # no cast on the line that fails brings back what another one rounded
        same = text if origin.file == finding.file else None
        exact: list[FixKind] = [kind for kind in kinds if kind not in _FLOATS + _REGIONS]
        yield from _fix_by(finding.file, finding.line, exact, op=finding.op, root=root, is_sure=True, text=text)
        yield from _fix_by(origin.file, origin.line, _FLOATS, op=origin.op, root=root, is_sure=True, text=same)
    yield from _fix_by(
        finding.file, finding.line, kinds, op=finding.op, root=root, is_sure=True, text=text,
        sources=KINDS_OF_SOURCES.get(finding.cause.id, ()), origins=KINDS_OF_ORIGINS.get(finding.cause.id, ()),
        steps=KINDS_OF_STEPS.get(finding.cause.id, ()), part=finding.module,
    )  # fmt: skip


def fix_line(
    file: str | Path,
    line: int,
    *,
    kinds: Sequence[FixKind] = KINDS_OF_FINDINGS,
    op: str = "",
    root: str | Path | None = None,
    is_sure: bool = False,
) -> CodeFix | None:
    """The change of one line by the first kind that fits; None where none does. The file is not written.

    Args:
        file: A Python file.
        line: A line of the statement, counted from 1.
        kinds: What is tried, in this order; by default all that some cause asks for.
        op: The operation that failed there, such as 'aten.sum'.
        root: Folder that the patch is applied in; None is the file's own.
        is_sure: Whether the line is known to fail: names such as `eps` and `fill` then count as what they say.
    """
    return next(_fix_by(file, line, kinds, op=op, root=root, is_sure=is_sure), None)


def _fix_by(
    file: str | Path,
    line: int,
    kinds: Sequence[FixKind],
    *,
    op: str,
    root: str | Path | None,
    is_sure: bool,
    text: str | None = None,
    sources: Sequence[FixKind] = (),
    origins: Sequence[FixKind] = (),
    steps: Sequence[FixKind] = (),
    part: str = "",
) -> Iterator[CodeFix]:
    """The change that each kind makes of a line, or of the statements that its names come from, where it fits."""
    path = Path(file)
    try:
        before = path.read_bytes().decode("utf-8") if text is None else text
        wrapper = MetadataWrapper(cst.parse_module(before), unsafe_skip_copy=True)
    except (OSError, UnicodeDecodeError, cst.ParserSyntaxError):
        return
    positions = find_positions(wrapper)
    found = find_statement(wrapper.module, positions, line)
    if found is None:
        return
    names, name = read_names(before), _name_in_patch(path, root)
    made_by = find_sources(found.around, found.line) if sources else ()
    places = [*((LinePlace(one, found.around), sources) for one in made_by), (found, kinds)]
    places += [(one, origins) for one in find_origins(wrapper.module, found)] if origins else []
    places += [(one, steps) for one in find_steps(found)] if steps else []
    for place, wanted in places:
        at = line if place is found else positions[place.line].start.line
        made, numbers = find_made(place.around, positions, at), find_numbers(wrapper.module, place)
        limits = ConstantReader(wrapper.module, place.around, names)
        scene = FixContext(names, made, _op_name(op), is_sure, part, numbers=numbers, limit=limits.read)
        for kind in wanted:
            change = _rewrite(wrapper.module, place.line, place.around, kind, scene)
            if change is not None:
                yield CodeFix(path, name, at, kind, change.says, change.safe, before, change.after)


class _Rewritten(NamedTuple):
    after: str
    says: str
    safe: bool


def _rewrite(
    module: cst.Module, line: cst.SimpleStatementLine, around: cst.CSTNode, kind: FixKind, scene: FixContext
) -> _Rewritten | None:
    """The file with one statement changed by one kind."""
    if kind in EXPRESSIONS:
        change = Replace(EXPRESSIONS[kind], scene, around)
        line.visit(change)
        if not change.says:
            return None
        return _Rewritten(module.visit(Put(change.nodes, change.lines)).code, change.says[0], change.safe)
    if kind in SPANS:
        edit = SPANS[kind](FileScene(module, line, around, scene))
        return None if edit is None else _Rewritten(edit.apply(module), edit.says, edit.safe)
    new = STATEMENTS[kind](line, around, scene)
    if new is None:
        return None
    try:
        after = module.visit(Exchange(line, new)).code
    except cst.ParserSyntaxError:
        return None
    return _Rewritten(after, new.says, kind not in _NOT_SAFE)


def _op_name(op: str) -> str:
    """'aten.sum.dim_IntList' and 'SumBackward1' are 'sum'."""
    name = op.rpartition(".")[2] if op.startswith("torch.") else op.removeprefix("aten.").split(".")[0]
    if "Backward" in name:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", name.split("Backward")[0]).lower()
    name = name.rstrip("_") or name
    return _OPS.get(name, name)


def _name_in_patch(path: Path, root: str | Path | None) -> str:
    if root is None:
        return path.name
    try:
        return path.resolve().relative_to(Path(root).resolve()).as_posix()
    except ValueError:
        return path.name
