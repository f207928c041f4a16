"""Operation: one operation of torch, however it is written."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One operation of torch, however it is written.

    Args:
        name: As torch calls it, such as 'softmax'; in-place forms without their underscore.
        operand: What it is applied to.
        args: The other positional arguments.
        keywords: The arguments with a name.
        node: The whole expression.
        is_method: Whether it is written as a method of its operand.
        is_in_place: Whether it writes to its operand.
    """

    name: str
    operand: ast.expr
    args: tuple[ast.expr, ...]
    keywords: dict[str, ast.expr]
    node: ast.expr
    is_method: bool = False
    is_in_place: bool = False

    def argument(self, place: int, name: str) -> ast.expr | None:
        """An argument by its place after the operand, or by its name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.args[place] if place < len(self.args) else None
