"""Where findings are, in the words of a plan: module, line, the function around it, and the rewrite that fits."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from floatline.findings import Finding
from floatline.fixes.code_fix import CodeFix
from floatline.plan.fields import REWRITE_KINDS
from floatline.salvage.remedies import Place


def locate(finding: Finding, fix: CodeFix | None, *, modules: Collection[str]) -> Place:
    """The place of a finding.

    Args:
        finding: What was found.
        fix: Its change of the code; None where none is known.
        modules: Names of the model's modules.
    """
    module = finding.module if finding.module in modules else ""
    rewrite = fix.kind if fix is not None and fix.kind in REWRITE_KINDS else None
    if not finding.file or not finding.line:
        return Place(finding, module, rewrite=rewrite)
    name = Path(finding.file).name
    function = name_function(Path(finding.file), finding.line)
    return Place(finding, module, f"{name}:{finding.line}", f"{name}:{function}" if function else "", rewrite)


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
