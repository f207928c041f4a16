"""From a finding to a change of the line that it names, where a rewrite for it is known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from floatline.findings import Finding
from floatline.fixes import expressions, statements
from floatline.fixes.code_fix import CodeFix
from floatline.fixes.names import ReadImports
from floatline.fixes.scope import find_made, find_statement
from floatline.fixes.statements import NewStatements

FixKind = Literal[
    "log-sigmoid", "log-softmax", "softplus", "exp-ratio", "bce-with-logits", "mask-constant", "small-eps",
    "float-operands", "unscale-before-clip", "step-through-scaler", "bare-parameter",
]  # fmt: skip
_EXPRESSIONS: dict[FixKind, expressions.Rewrite] = {
    "log-sigmoid": expressions.log_sigmoid,
    "log-softmax": expressions.log_softmax,
    "softplus": expressions.softplus,
    "exp-ratio": expressions.exp_ratio,
    "bce-with-logits": expressions.bce_with_logits,
    "mask-constant": expressions.mask_constant,
    "small-eps": expressions.small_eps,
    "float-operands": expressions.float_operands,
}
_STATEMENTS = {
    "unscale-before-clip": statements.unscale_before_clip,
    "step-through-scaler": statements.step_through_scaler,
    "bare-parameter": statements.bare_parameter,
}
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
_OPS = {"linalg_vector_norm": "norm", "vector_norm": "norm", "square": "pow", "rsub": "sub", "true_divide": "div"}


def fix_finding(finding: Finding, *, root: str | Path | None = None) -> CodeFix | None:
    """The change of the user's source that takes a finding away; None where no rewrite is known.

    Args:
        finding: With file and line.
        root: Folder that the patch is applied in; None is the file's own.
    """
    kinds = KINDS_OF_CAUSES.get(finding.cause.id, ())
    if not finding.file or not finding.line or not kinds:
        return None
    return fix_line(finding.file, finding.line, kinds=kinds, op=finding.op, root=root, is_sure=True)


def fix_line(
    file: str | Path,
    line: int,
    *,
    kinds: Sequence[FixKind] = get_args(FixKind),
    op: str = "",
    root: str | Path | None = None,
    is_sure: bool = False,
) -> CodeFix | None:
    """The change of one line by the first kind that fits; None where none does. The file is not written.

    Args:
        file: A Python file.
        line: A line of the statement, counted from 1.
        kinds: What is tried, in this order.
        op: The operation that failed there, such as 'aten.sum'.
        root: Folder that the patch is applied in; None is the file's own.
        is_sure: Whether the line is known to fail: names such as `eps` and `fill` then count as what they say.
    """
    path = Path(file)
    try:
        before = path.read_bytes().decode("utf-8")
        wrapper = MetadataWrapper(cst.parse_module(before), unsafe_skip_copy=True)
    except (OSError, UnicodeDecodeError, cst.ParserSyntaxError):
        return None
    positions = wrapper.resolve(PositionProvider)
    found = find_statement(wrapper.module, positions, line)
    if found is None:
        return None
    reader = ReadImports()
    wrapper.module.visit(reader)
    made = find_made(found.around, positions, line)
    scene = expressions.Scene(reader.names, made, _op_name(op), is_sure)
    name = _name_in_patch(path, root)
    for kind in kinds:
        if kind in _EXPRESSIONS:
            change = _Replace(found.line, _EXPRESSIONS[kind], scene)
            after = wrapper.module.visit(change).code
            if change.says:
                return CodeFix(path, name, line, kind, change.says[0], change.safe, before, after)
            continue
        new = _STATEMENTS[kind](found.line, found.around, reader.names)
        if new is not None:
            after = wrapper.module.visit(_Exchange(found.line, new)).code
            return CodeFix(path, name, line, kind, new.says, kind != "step-through-scaler", before, after)
    return None


class _Replace(cst.CSTTransformer):
    """Rewrites expressions of one statement, the outermost first."""

    def __init__(self, line: cst.SimpleStatementLine, rewrite: expressions.Rewrite, scene: expressions.Scene) -> None:
        super().__init__()
        self._line, self._rewrite, self._scene = line, rewrite, scene
        self._inside = False
        self._new: dict[cst.CSTNode, cst.BaseExpression] = {}
        self.says: list[str] = []
        self.safe = True

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Look at what is in the statement; what is replaced is not looked into."""
        if node is self._line:
            self._inside = True
        if not self._inside or not isinstance(node, cst.BaseExpression):
            return True
        change = self._rewrite(node, self._scene)
        if change is None:
            return True
        kept = change.node
        if getattr(node, "lpar", ()) and not getattr(kept, "lpar", ()):
            kept = kept.with_changes(lpar=node.lpar, rpar=node.rpar) if not isinstance(kept, cst.Call) else kept
        self._new[node] = kept
        self.says.append(change.says)
        self.safe = self.safe and change.safe
        return False

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Put in what was found."""
        if original_node is self._line:
            self._inside = False
        return self._new.get(original_node, updated_node)


class _Exchange(cst.CSTTransformer):
    """Puts other statements in the place of one."""

    def __init__(self, line: cst.SimpleStatementLine, new: NewStatements) -> None:
        super().__init__()
        self._line, self._new = line, new

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Exchange it."""
        if original_node is not self._line:
            return updated_node
        lines = [cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine) for text in self._new.statements]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)


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
