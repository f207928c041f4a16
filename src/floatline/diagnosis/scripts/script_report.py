"""ScriptDiagnosis: what a script's training suffers from, as read from the report of its process. Without torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding


@dataclass(frozen=True, kw_only=True)
class ScriptDiagnosis(Diagnosis):
    """What a script's training suffers from.

    Args:
        exit_code: The script's own.
        start_seconds: Before the end of its first backward pass.
    """

    exit_code: int = 0
    start_seconds: float = 0.0

    @property
    def status(self) -> int:
        """The exit code of the command: 2 without a verdict; else the script's own, or 1 where something is wrong."""
        return 2 if self.verdict == "no-verdict" else self.exit_code or super().status

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract, and what only a script has."""
        own = {"exit_code": self.exit_code, "unexplained": self.unexplained, "notes": list(self.notes)}
        return super().as_json() | own


def read_report(text: str, seen: dict[str, Any], code: int, seconds: float) -> ScriptDiagnosis:
    """What the process of a script wrote down, as a diagnosis.

    Args:
        text: The command, as the user wrote it.
        seen: The report; {} where the process ended before it was written.
        code: The exit code of the process, as a shell would have it.
        seconds: How long it took.

    """
    if not seen:
        ended = f"the script {_say_end(code)} before floatline could sum it up"
        return ScriptDiagnosis(text, "", (), seconds, exit_code=code, no_verdict=ended)
    if not seen["num_backward"] and not seen["findings"] and not code:
        unseen = "no backward pass was seen: the command does not train, or in a way that was not seen"
        return ScriptDiagnosis(text, seen["precision"], (), seconds, notes=tuple(seen["notes"]), no_verdict=unseen)
    return ScriptDiagnosis(
        text,
        seen["precision"],
        tuple(Finding.read(entry) for entry in seen["findings"]),
        seconds,
        notes=tuple(seen["notes"]),
        exit_code=code,
        start_seconds=seen.get("start_seconds", 0.0),
        unexplained=seen["unexplained"],
        fails_in_fp32=seen["fails_in_fp32"],
        no_verdict="" if seen["unexplained"] else _explain_end(seen, code) or seen["unseen"],
    )


def _explain_end(seen: dict[str, Any], code: int) -> str:
    """Why a script that did not come to its end has no verdict, its own words first; '' for one that did."""
    if not code:
        return ""
    steps = seen["num_steps"]
    after = f"after {steps:,} step{'s' if steps > 1 else ''}" if steps else "before its first step"
    words = seen["exception"].strip().splitlines() or [seen["last_line"]]
    first = words[0].rstrip(" .:")
    said = f"{first}: " if first else ""
    return f"{said}the script {_say_end(code)} {after}"


def _say_end(code: int) -> str:
    """What a shell's exit code says of how a process ended."""
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names[code - 128]}" if code - 128 in names else f"ended with exit code {code}"
