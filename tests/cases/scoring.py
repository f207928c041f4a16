"""Scores a diagnosis of a case: is the cause right, the place, the verdict; is a fixed twin left in peace?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from tests.cases.harness import Case

from floatline.causes import CAUSES
from floatline.errors import FloatlineError
from floatline.probe.trace.kernel_checks import is_measured

Diagnose = Callable[[str], dict[str, Any]]  # a target's text to what --format json prints


@dataclass(frozen=True)
class Score:
    """What was found for a case as given, and for its fixed twin, against what the case expects."""

    name: str
    expected: str
    found: str
    where: str
    cause_right: bool
    place_right: bool
    verdict_right: bool
    seconds: float
    alarms: tuple[str, ...]
    twin_seconds: float

    @property
    def healthy(self) -> bool:
        """Whether the case is a control, in which nothing is wrong."""
        return self.expected == "healthy"

    @property
    def right(self) -> bool:
        """Whether nothing at all is to be said against it."""
        return self.cause_right and self.place_right and self.verdict_right and not self.alarms


def score_case(case: Case, diagnose: Diagnose) -> Score:
    """Diagnose a case and its fixed twin."""
    given, twin = answer(diagnose, str(case.path)), answer(diagnose, f"{case.path}:fixed")
    first = given["findings"][0] if given["findings"] else None
    return Score(
        name=case.name,
        expected=case.expect["cause"],
        found=first["cause"] if first else given["verdict"],
        where=describe_place(first) if first else "",
        cause_right=is_cause_right(case, given),
        place_right=is_place_right(case, first),
        verdict_right=given["verdict"] == expected_verdict(case),
        seconds=given["seconds"],
        alarms=find_alarms(case, given, twin),
        twin_seconds=twin["seconds"],
    )


def answer(diagnose: Diagnose, target: str) -> dict[str, Any]:
    """What the diagnosis says; an error is a wrong answer, and no end of the scoring."""
    try:
        return diagnose(target)
    except FloatlineError as error:
        return {"verdict": f"error: {error}", "findings": [], "seconds": 0.0}


def is_judged_here(case: Case) -> bool:
    """Whether this machine can say it: kernels are judged where their bounds were measured."""
    return is_measured(torch.device("cpu")) or case.expect["cause"] != "kernel-off"


def expected_verdict(case: Case) -> str:
    """The verdict that belongs to the cause."""
    if case.healthy:
        return "healthy"
    return "not-precision" if CAUSES[case.expect["cause"]].family == "not-precision" else "precision"


def is_cause_right(case: Case, given: dict[str, Any]) -> bool:
    """Whether the first finding names the cause; for a control, whether there is no finding."""
    if case.healthy:
        return given["verdict"] == "healthy"
    return bool(given["findings"]) and given["findings"][0]["cause"] == case.expect["cause"]


def is_place_right(case: Case, finding: dict[str, Any] | None) -> bool:
    """Whether it names the line, or the module or parameter, exactly.

    The root module, '', is what a finding says that knows no module: it is right only with its line.
    """
    if finding is None:
        return case.healthy
    line = f"{PurePath(finding['file']).name}:{finding['line']}"
    return line in case.places or (finding["module"] != "" and finding["module"] in case.places)


def find_alarms(case: Case, given: dict[str, Any], twin: dict[str, Any]) -> tuple[str, ...]:
    """Findings where nothing is wrong: in a control, and in every fixed twin. An error is one, too."""
    silent = [twin, given] if case.healthy else [twin]
    causes = [[finding["cause"] for finding in run["findings"]] or [run["verdict"]] for run in silent]
    return tuple(name for names in causes for name in names if name != "healthy")


def describe_place(finding: dict[str, Any]) -> str:
    """The place of a finding in one word or two."""
    line = f"{PurePath(finding['file']).name}:{finding['line']}" if finding["file"] else ""
    return " ".join(part for part in (line, finding["module"]) if part) or "(root)"
