"""The catalogue of causes, and how an id or a pasted message finds its entry."""

from __future__ import annotations

import re

from floatline.causes.cause import FAMILIES, Cause, Family
from floatline.causes.dtypes import DTYPES
from floatline.causes.elsewhere import ELSEWHERE
from floatline.causes.overflow import OVERFLOWS
from floatline.causes.rounding import ROUNDINGS
from floatline.causes.scaler import SCALERS
from floatline.causes.symptoms import SYMPTOMS, Symptom
from floatline.causes.underflow import UNDERFLOWS
from floatline.errors import CauseError, suggest

__all__ = [
    "CAUSES",
    "FAMILIES",
    "SYMPTOMS",
    "Cause",
    "Family",
    "Symptom",
    "find_cause",
    "find_named_causes",
    "find_symptom",
    "match_message",
]

CAUSES: dict[str, Cause] = {
    cause.id: cause for cause in (*OVERFLOWS, *UNDERFLOWS, *ROUNDINGS, *SCALERS, *DTYPES, *ELSEWHERE)
}


def find_cause(name: str) -> Cause:
    """The cause of that id; case, underscores and spaces do not matter.

    Raises:
        CauseError: No cause has that id; the message names the nearest ones.
    """
    key = "-".join(re.split(r"[\s_-]+", name.strip().lower()))
    if key in CAUSES:
        return CAUSES[key]
    raise CauseError(
        f"Cause {name[:80]!r} is not in the catalogue. {suggest(key[:80], CAUSES, lists=False)} "
        "'floatline explain' lists all; an error message can be pasted whole, in quotes."
    )


def match_message(text: str) -> list[Cause]:
    """The causes that fit an error message, a traceback or a log, best first.

    Those that the text names (`find_named_causes`) come first, then those that share the symptom it
    shows (`find_symptom`).
    """
    symptom = find_symptom(text)
    shared = [CAUSES[name] for name in symptom.causes] if symptom else []
    return list(dict.fromkeys((*find_named_causes(text), *shared)))


def find_named_causes(text: str) -> list[Cause]:
    """The causes of which a text holds a message that no other cause gives.

    The later in the text comes first: the last error is the one that stopped the run.
    """
    text = _flatten(text)
    seen = {cause: cause.last_seen(text) for cause in CAUSES.values()}
    return sorted((cause for cause in seen if seen[cause] >= 0), key=lambda cause: -seen[cause])


def find_symptom(text: str) -> Symptom | None:
    """The most specific symptom that a text shows, of those that several causes share."""
    text = _flatten(text)
    return next((symptom for symptom in SYMPTOMS if symptom.is_in(text)), None)


def _flatten(text: str) -> str:
    # Terminals colour and wrap messages: neither may hide one.
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())
