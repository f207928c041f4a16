"""FL2xx: the order of a training loop."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod

from floatline.lint.reading.loop import Unit, find_units
from floatline.lint.rule import Rule


class LoopRule(Rule, ABC):
    """A rule about training loops. `visit_unit` sees every place of a file that trains."""

    words = (".backward(",)

    @abstractmethod
    def visit_unit(self, unit: Unit) -> None:
        """One place that trains."""

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """The places of the file that train."""
        del node
        for unit in find_units(self.source):
            self.visit_unit(unit)
