"""Where ranks can part: a collective in a loop, after a branch that one rank may take alone."""

from __future__ import annotations

import ast
from pathlib import Path

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
