"""The judge: what became of a run, told from a witness and a run without the fault; never from what the guard says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import floatline as fl
from campaign.trial import Seen
from floatline.errors import LedgerError

Outcome = Literal["survived", "stopped", "noticed", "not seen", "hang", "corrupted", "false ledger", "lost"]
GOOD: tuple[Outcome, ...] = ("survived", "stopped", "noticed", "not seen")
WORST_FIRST: tuple[Outcome, ...] = (
    "hang",
    "corrupted",
    "false ledger",
    "lost",
    "not seen",
    "noticed",
    "stopped",
    "survived",
)


@dataclass(frozen=True)
class Verdict:
    """What became of a run.

    Args:
        outcome: 'survived': it went on, with the bits of the run without the fault; 'stopped': it ended by itself
            with a sound state; 'noticed': a bit of memory changed, steps were skipped for it, and it stayed; 'not
            seen': no number showed it; 'hang', 'corrupted' weights, 'false ledger'; 'lost': it could not go on.
        steps_lost: Steps that were left out or have to be made again.
        note: What was seen.
    """

    outcome: Outcome
    steps_lost: int = 0
    note: str = ""


class BrokenError(Exception):
    """A fact that must hold and does not; the outcome it means."""

    def __init__(self, outcome: Outcome, note: str) -> None:
        super().__init__(note)
        self.verdict = Verdict(outcome, note=note)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """What became of a run of several processes."""
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome))


def check_step(seen: Seen, *, harmful: bool) -> None:
    """A step whose numbers were not finite leaves every bit of the weights; what the guard says of it is true."""
    if harmful and (seen.applied or seen.changed):
        raise BrokenError("corrupted", f"a step with inf or NaN was applied (reason {seen.reason})")
    if seen.applied != seen.changed:
        raise BrokenError("corrupted", f"the guard says applied={seen.applied}, the weights say {seen.changed}")


def check_same(found: dict[str, str], expected: dict[str, str], what: str) -> None:
    """Every bit of weights, states, scale, windows and random numbers is that of the reference."""
    other = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if other:
        raise BrokenError("corrupted", f"{what}: {', '.join(other[:4])} differ from the run without the fault")


def check_row(found: Sequence[str], expected: Sequence[str]) -> None:
    """The weights after each step are those of the reference."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            raise BrokenError("corrupted", f"the weights after step {step} differ from the run without the fault")


def check_ledger(folder: Path, witnesses: Sequence[Sequence[Seen | None]]) -> None:
    """Compare a ledger with what every process saw.

    Args:
        folder: Run folder.
        witnesses: The steps that each process saw, in order; None where one did not live to take it down.

    Raises:
        BrokenError: A line is missing, too much, or says something else than the witnesses.
    """
    try:
        history = fl.Ledger.read(folder)
    except LedgerError as error:
        raise BrokenError("false ledger", str(error)) from None
    num = len(history.attempt)
    completed = max(map(len, witnesses))
    if num != completed:
        raise BrokenError("false ledger", f"the ledger has {num} steps of {completed} that were completed")
    for step, row in enumerate(zip(*witnesses, strict=True)):
        check_line(step, history.applied[step], history.reason[step], history.loss[step], row)


def check_line(step: int, applied: bool, reason: str | None, loss: float | None, row: Sequence[Seen | None]) -> None:
    """One line of a ledger against what every process saw of that step."""
    there = [seen for seen in row if seen is not None]
    for seen in there:
        if applied != seen.changed or reason != seen.reason:
            raise BrokenError(
                "false ledger", f"line {step + 1}: {applied}, {reason}; seen: {seen.changed}, {seen.reason}"
            )
    if len(there) < len(row):
        return  # the mean of the losses is not known
    mean = sum(seen.loss for seen in there) / len(there)
    alike = loss is not None and math.isfinite(mean) == math.isfinite(loss)
    if not alike or (math.isfinite(mean) and not math.isclose(loss or 0.0, mean, rel_tol=1e-5)):
        raise BrokenError("false ledger", f"line {step + 1} has loss {loss}, and {mean} was seen")
