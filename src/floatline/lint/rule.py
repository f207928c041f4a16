"""Rule: one way of writing code that breaks in 16 bits. Its examples are its tests and its docs page."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from floatline.lint.reading.gradients import has_gradient
from floatline.lint.reading.mentions import find_owners
from floatline.lint.reading.reaching import is_open_default
from floatline.lint.reading.under_autocast import (
    is_beside_autocast,
    is_wide_under_autocast,
    shows_16_bits,
    shows_half,
    shows_narrow,
)

if TYPE_CHECKING:
    from floatline.causes import Cause
    from floatline.fixes import FixKind
    from floatline.hardware import Hardware
    from floatline.lint.reading.source import Source


Holds = Literal["any", "autocast", "half", "input", "seldom"]
_WHEN: dict[Holds, str] = {
    "any": "",
    "autocast": "under autocast, and in pure half",
    "half": "in pure half only; autocast computes this in FP32",
    "input": "where what it is given is 16 bits, which nothing here shows",
    "seldom": "under autocast, and in pure half, where a number comes to 0, or beyond a bound, that seldom does",
}


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
        holds: Under autocast as well; in pure half only, where nothing is widened; where its input is 16 bits, which
            nothing shows; where a number is 0 or beyond a bound, which it seldom is. 'any' is no matter of that.
        text: The source line, without its indentation; a baseline knows old findings by it.
        owners: The functions and classes of its file by which alone it is reached; none where the file runs it.
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
    holds: Holds = "any"
    text: str = ""
    owners: tuple[str, ...] = ()

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
            "holds": self.holds,
            "fixable": self.rule.fix_safety if self.fix else "no",
        }

    def is_told(self, *, shows_half: bool) -> bool:
        """Whether it is told by itself: what is for pure half where that is shown, what is for some input never."""
        return self.holds in ("any", "autocast") or (self.holds == "half" and shows_half)

    @property
    def when(self) -> str:
        """Where it holds, in words; '' where that is no matter of precision."""
        return _WHEN[self.holds]

    def __str__(self) -> str:
        """Some lines for people."""
        when = f"  when: {self.when}\n" if self.when else ""
        return (
            f"{self.file}:{self.line}:{self.column}: {self.rule.code} {self.title}\n"
            f"  seen: {self.seen}\n{when}"
            f"  fix:  {self.advice}\n"
            f"  why:  floatline explain {self.rule.code}"
        )


FixSafety = Literal["safe", "unsafe", "no"]


@dataclass(frozen=True)
class Bad:
    """An example with more than its code: what it is fixed to, or a file that is not Python.

    Args:
        source: The code.
        fixed: The same after `--fix --unsafe-fixes`; None where a person has to fix it.
        file: A name that the rule looks at, such as 'ds_config.json'; Python else.
        on: Hardware that the code is for, such as 'sm_75'; '' where the rule does not ask.
    """

    source: str
    fixed: str | None = None
    file: str = "example.py"
    on: str = ""


def read_examples(given: Iterable[str | Bad]) -> list[Bad]:
    """The examples of a rule, all in one form."""
    return [one if isinstance(one, Bad) else Bad(one) for one in given]


class Rule:
    """One rule. A subclass states its claim, and visits the nodes that it wants to see.

    A method `visit_NODE` (`visit_Call`, `visit_BinOp`, `visit_With`, `visit_FunctionDef`, …) is called with every node
    of that kind; `visit_Module` once with the whole tree. Calls are many: `visit_Call` sees only those whose last
    name (`log` of `torch.log(x)`, of `x.log()`, and of `l(x)` after `from torch import log as l`) is in `calls`.

    Attributes:
        code: FL1xx numbers, FL2xx the order of a training loop, FL3xx configurations.
        name: Reads well after "allow".
        title: What is wrong, in a few words; '' takes the title of the cause.
        cause: The entry of the catalogue; None where no number is harmed.
        message: What stands there and what becomes of it in 16 bits.
        advice: What to write instead, as one line.
        fix_safety: 'safe': the same function in exact arithmetic, never less accurate. 'unsafe': a person should look.
            'no': nothing is rewritten.
        only_if_selected: Whether it is asked only where its code or name is selected, or with --half: of what it
            finds, too little does harm.
        is_of_models: Whether what it is about is nearly always what a model gives, shown or not.
        needs_proof: Whether it is told by itself only where the file shows the product or layer that made a value.
        needs_16_bits: Whether it is told by itself only in a file that names 16 bits.
        needs_gradient: Whether it does harm only where a gradient flows: not in metrics, samplers, tests and the like.
        holds: 'autocast': what is computed under autocast breaks, too. 'half': only what runs in FP16 without it.
        calls: Last names of the calls that `visit_Call` sees.
        words: The rule is asked only about files that hold one of these; empty takes `calls`.
        good: Near misses that stay silent. A string is Python code.
        bad: What is flagged; at least one with an aliased import. A string is Python code that nothing fixes.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str] = ""
    cause: ClassVar[Cause | None] = None
    message: ClassVar[str]
    advice: ClassVar[str]
    fix_safety: ClassVar[FixSafety] = "no"
    only_if_selected: ClassVar[bool] = False
    is_of_models: ClassVar[bool] = False
    needs_proof: ClassVar[bool] = False
    needs_16_bits: ClassVar[bool] = False
    needs_gradient: ClassVar[bool] = False
    holds: ClassVar[Holds] = "any"
    calls: ClassVar[frozenset[str]] = frozenset()
    words: ClassVar[tuple[str, ...]] = ()
    good: ClassVar[tuple[str | Bad, ...]] = ()
    bad: ClassVar[tuple[str | Bad, ...]] = ()

    def __init__(self, source: Source, *, on: Hardware | None = None) -> None:
        self.source = source
        self.on = on
        self.found: list[LintFinding] = []

    def report(
        self,
        node: ast.AST,
        *,
        seen: str = "",
        advice: str = "",
        fix: FixKind | None = None,
        of: ast.expr | None = None,
        by: ast.expr | None = None,
        holds: Holds | None = None,
        is_seldom: bool = False,
    ) -> None:
        """Flag a node.

        Args:
            node: Where.
            seen: What stands there, with its numbers; '' is the rule's message.
            advice: '' is the rule's.
            fix: The rewrite that fixes this place, where there is one.
            of: The value that is too coarse. Where autocast widens it, the finding holds in pure half only; and where
                nothing shows that it is 16 bits, it holds if its input is.
            by: The number that FP16 has trouble with. Where it is a default that callers may change, it holds if it is
                left as it is.
            holds: None is the rule's.
            is_seldom: Whether it does harm only at a number that is seldom met.
        """
        if self.needs_gradient and isinstance(node, ast.expr) and not has_gradient(self.source, node, surely=False):
            return
        holds = holds or self._where_it_holds(node, of)
        if holds == "half" and "autocast" not in self.source.text and shows_half(self.source, node):
            holds = "any"
        if holds != "any" and by is not None and is_open_default(self.source, by):
            holds = "input"
        if holds == "autocast" and is_seldom:
            holds = "seldom"
        line = getattr(node, "lineno", 1)
        column = getattr(node, "col_offset", 0)
        self.report_at(
            line,
            self.source.column(line, column),
            end_line=getattr(node, "end_lineno", None) or line,
            end_column=self.source.column(
                getattr(node, "end_lineno", None) or line, getattr(node, "end_col_offset", None) or column
            ),
            seen=seen,
            advice=advice,
            fix=fix,
            holds=holds,
            owners=find_owners(self.source, node) if holds == "autocast" else (),
        )

    def _where_it_holds(self, node: ast.AST, of: ast.expr | None) -> Holds:
        holds: Holds = "half" if of is not None and is_wide_under_autocast(self.source, of) else self.holds
        if holds == "half" and is_beside_autocast(self.source, node):
            return "autocast"
        if holds == "autocast" and self.needs_16_bits and not shows_16_bits(self.source.text):
            return "input"
        if holds != "autocast" or of is None or self.is_of_models:
            return holds
        return "autocast" if shows_narrow(self.source, of, surely=self.needs_proof) else "input"

    def report_at(
        self,
        line: int,
        column: int,
        *,
        end_line: int = 0,
        end_column: int = 0,
        seen: str = "",
        advice: str = "",
        fix: FixKind | None = None,
        holds: Holds | None = None,
        owners: tuple[str, ...] = (),
    ) -> None:
        """Flag a place by its numbers, both counted from 1."""
        self.found.append(
            LintFinding(
                rule=type(self),
                file=self.source.file,
                line=line,
                column=column,
                end_line=end_line or line,
                end_column=end_column or column,
                seen=seen or self.message,
                advice=advice or self.advice,
                fix=fix or "",
                holds=holds or self.holds,
                text=self.source.line(line),
                owners=owners,
            )
        )
