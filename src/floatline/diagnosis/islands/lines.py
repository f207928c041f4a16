"""LineAlternative: the few lines of code whose operations in FP32 do the same as an island of modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from floatline.diagnosis.islands.judge import IslandJudge
from floatline.diagnosis.islands.module_sets import covers, minimize
from floatline.diagnosis.islands.suspects import Suspect, count_operations, narrow_operations
from floatline.precision.islands import Line
from floatline.probe.trace.trace import Trace

# So many lines are tried alone, and so many together are still a place in the code.
_MOST_ALONE = 8
_MOST_TOGETHER = 12


@dataclass(frozen=True)
class LineAlternative:
    """Lines of code that suffice in FP32.

    Args:
        lines: File and line of each.
        num_operations: 16-bit operations that they run in the forward pass, in all modules that use the code.
        of_island: The same of the modules that would be kept otherwise; 0 where there are none.
    """

    lines: tuple[Line, ...]
    num_operations: int
    of_island: int

    def __str__(self) -> str:
        """'model.py:31 in FP32, 12 operations a step (the modules: 5)'."""
        places = ", ".join(f"{Path(file).name}:{line}" for file, line in self.lines)
        against = f" (the modules: {self.of_island})" if self.of_island else ""
        return f"{places} in FP32, {self.num_operations} operations a step{against}"


def find_lines(
    judge: IslandJudge, trace: Trace, suspects: Sequence[Suspect], modules: Sequence[str]
) -> LineAlternative | None:
    """Lines that suffice without any module in FP32: one if possible, else the fewest; None where none were found.

    Args:
        judge: Tries them.
        trace: A failing step as it was.
        suspects: What it accuses.
        modules: The island; none looks at the code outside of all modules.
    """
    own = [op for op in narrow_operations(trace) if (covers(modules, op.module) if modules else not op.module)]
    accused = [s.line for s in suspects if covers(modules, s.module) or not s.module]
    rows = _known([*accused, *((op.file, op.line) for op in own)])
    for line in rows[:_MOST_ALONE]:
        if judge.passes((), (line,)):
            return _describe((line,), trace, len(own) if modules else 0)
    together = rows[:_MOST_TOGETHER]
    if len(together) < 2 or not judge.passes((), together):
        return None
    fewest = minimize(together, lambda some: judge.passes((), some))
    return _describe(tuple(fewest), trace, len(own) if modules else 0)


def _known(lines: Iterable[Line]) -> list[Line]:
    return list(dict.fromkeys(line for line in lines if line[0] and line[1]))


def _describe(lines: tuple[Line, ...], trace: Trace, of_island: int) -> LineAlternative:
    return LineAlternative(lines, count_operations(trace, lines=frozenset(lines)), of_island)
