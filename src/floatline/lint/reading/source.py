"""Source: one file as rules see it: its tree, and what its values are made of."""

from __future__ import annotations

import ast

from floatline.lint.reading import values
from floatline.lint.reading.source_tree import Operation, SourceTree

__all__ = ["Operation", "Source"]


class Source(SourceTree):
    """A Python file, parsed, and what it shows of its values.

    Args:
        text: The file.
        file: Its name, for findings.
        neighbours: The other files of its tree; None where nothing is known of them.

    Raises:
        SyntaxError: It is not Python.
    """

    def is_tensor(self, node: ast.expr) -> bool:
        """As `SourceTree` says."""
        return values.is_tensor(self, node)

    def dtype(self, node: ast.expr) -> str:
        """'half', 'wide' (FP32 or FP64), 'integer', or '' where the file does not show it."""
        return values.read_dtype(self, node)

    def number(self, node: ast.AST | None) -> float | None:
        """A number: a literal, a power or product of literals, float('inf'), or a name that stands for one."""
        return values.read_number(self, node)

    def value(self, node: ast.expr) -> ast.expr:
        """What a local name was made from, where there is one answer; else the node itself."""
        return values.read_value(self, node)
