"""From a finding to a change of the line that it names, where a rewrite for it is known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper

from floatline.findings import Finding
from floatline.fixes import expressions
from floatline.fixes.code_fix import CodeFix
from floatline.fixes.kinds import EXPRESSIONS, STATEMENTS, FixKind
from floatline.fixes.names import ReadImports
from floatline.fixes.positions import find_positions
from floatline.fixes.rewriting import Exchange, Replace
from floatline.fixes.scope import find_made, find_statement

_LOGS: tuple[FixKind, ...] = ("log-sigmoid", "log-softmax", "softplus", "bce-with-logits")
# What is tried for each cause, in this order.
KINDS_OF_CAUSES: dict[str, tuple[FixKind, ...]] = {
    "scalar-out-of-range": ("mask-constant",),
    "rounded-onto-singularity": (*_LOGS, "float-operands"),
    "exp-overflow": ("exp-ratio", "softplus", "log-softmax", "float-operands"),
    "eps-underflow": ("log-sigmoid", "small-eps", "float-operands"),
    "reduction-overflow": ("float-operands",),
    "product-overflow": ("float-operands",),
    "gradient-overflow": (*_LOGS, "exp-ratio", "float-operands"),
    "cancellation": ("float-operands",),
    "unsupported-half-op": ("bce-with-logits", "float-operands"),
    "autocast-region-misuse": ("bce-with-logits",),
    "clip-before-unscale": ("unscale-before-clip",),
    "scaler-misuse": ("step-through-scaler",),
    "params-not-trained": ("bare-parameter",),
}
KINDS_OF_FINDINGS: tuple[FixKind, ...] = tuple({kind: None for kinds in KINDS_OF_CAUSES.values() for kind in kinds})
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
    if finding.file and finding.line and kinds:
        yield from _fix_by(finding.file, finding.line, kinds, op=finding.op, root=root, is_sure=True, text=text)


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
) -> Iterator[CodeFix]:
    """The change that each kind makes of a line, where it fits."""
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
    reader = ReadImports()
    wrapper.module.visit(reader)
    made = find_made(found.around, positions, line)
    scene = expressions.FixContext(reader.names, made, _op_name(op), is_sure)
    name = _name_in_patch(path, root)
    for kind in kinds:
        if kind in EXPRESSIONS:
            change = Replace(found.line, EXPRESSIONS[kind], scene)
            after = wrapper.module.visit(change).code
            if change.says:
                yield CodeFix(path, name, line, kind, change.says[0], change.safe, before, after)
            continue
        new = STATEMENTS[kind](found.line, found.around, reader.names)
        if new is not None:
            after = wrapper.module.visit(Exchange(found.line, new)).code
            yield CodeFix(path, name, line, kind, new.says, kind != "step-through-scaler", before, after)


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
