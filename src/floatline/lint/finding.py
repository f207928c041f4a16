"""LintFinding: a place in a file, the rule that it breaks, and what to write there instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from floatline.lint.rule import Rule


@dataclass(frozen=True)
class LintFinding:
    """One line of source, or of a configuration, that breaks a rule.

    Args:
        rule: The rule.
        file: As it was given.
        line: Counted from 1.
        column: Counted from 1.
        end_line: The line where the expression ends.
        end_column: The column after its last character.
        seen: What stands there, and what becomes of it in 16 bits.
        advice: What to change, as one line.
        fix: The kind of rewrite that `--fix` makes; '' where a person has to.
        text: The source line, without its indentation; a baseline knows old findings by it.
    """

    rule: type[Rule]
    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    seen: str
    advice: str
    fix: str = ""
    text: str = ""

    @property
    def title(self) -> str:
        """What is wrong, in a few words."""
        return self.rule.title or (self.rule.cause.title if self.rule.cause else self.rule.name)

    def as_json(self) -> dict[str, Any]:
        """Plain fields, for programs."""
        return {
            "code": self.rule.code,
            "name": self.rule.name,
            "cause": self.rule.cause.id if self.rule.cause else None,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "end_line": self.end_line,
            "end_column": self.end_column,
            "title": self.title,
            "seen": self.seen,
            "fix": self.advice,
            "fixable": self.rule.fix_safety if self.fix else "no",
        }

    def __str__(self) -> str:
        """Four lines for people."""
        return (
            f"{self.file}:{self.line}:{self.column}: {self.rule.code} {self.title}\n"
            f"  seen: {self.seen}\n"
            f"  fix:  {self.advice}\n"
            f"  why:  floatline explain {self.rule.code}"
        )
