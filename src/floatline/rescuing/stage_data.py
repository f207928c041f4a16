"""A diagnosis, an island and a short run as plain JSON data, and back."""

from __future__ import annotations

import reprlib
from typing import Any

from floatline.base.plain_records import from_plain, to_plain
from floatline.causes import find_cause
from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
from floatline.diagnosis.headroom.step_rows import Row, Span
from floatline.diagnosis.islands.island import Island
from floatline.diagnosis.result import Diagnosis
from floatline.errors import CauseError, ComparisonError, FormatError, RescueError
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.rescuing.short_run import Trial

_FINDING = ("seen", "fix", "module", "file", "line", "op")


def plain_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as JSON can hold it."""
    return {
        "target": diagnosis.target,
        "precision": diagnosis.precision,
        "findings": [
            {"cause": finding.cause.id, **{name: getattr(finding, name) for name in _FINDING}}
            for finding in diagnosis.findings
        ],
        "seconds": diagnosis.seconds,
        "tried": list(diagnosis.tried),
        "notes": list(diagnosis.notes),
        "scale": to_plain(diagnosis.scale),
        "chart": [{**to_plain(row), "format": row.format.name} for row in diagnosis.chart],
        "unexplained": diagnosis.unexplained,
        "fails_in_fp32": diagnosis.fails_in_fp32,
    }


def read_diagnosis(data: dict[str, Any]) -> Diagnosis:
    """What `plain_diagnosis` was given; RescueError for anything else."""
    try:
        findings = [
            Finding(cause=find_cause(str(entry["cause"])), **{name: _checked(entry, name) for name in _FINDING})
            for entry in data["findings"]
        ]
        return Diagnosis(
            target=str(data["target"]),
            precision=str(data["precision"]),
            findings=tuple(findings),
            seconds=float(data["seconds"]),
            tried=tuple(map(str, data["tried"])),
            notes=tuple(map(str, data["notes"])),
            scale=None if data["scale"] is None else from_plain(ScaleVerdict, data["scale"]),
            chart=tuple(map(_read_row, data["chart"])),
            unexplained=str(data["unexplained"]),
            fails_in_fp32=bool(data["fails_in_fp32"]),
        )
    except (ArithmeticError, LookupError, TypeError, ValueError, CauseError, ComparisonError, FormatError) as error:
        raise _unreadable("diagnosis", error) from None


def read_island(data: dict[str, Any]) -> Island:
    """The island that `to_plain` was given; RescueError for anything else."""
    try:
        return from_plain(Island, data)
    except ComparisonError as error:
        raise _unreadable("island", error) from None


def read_trial(data: dict[str, Any]) -> Trial:
    """The short run that `to_plain` was given; RescueError for anything else."""
    try:
        return from_plain(Trial, data)
    except ComparisonError as error:
        raise _unreadable("short run", error) from None


def _checked(entry: dict[str, Any], name: str) -> Any:
    value = entry[name]
    if not isinstance(value, int if name == "line" else str):
        raise ValueError(f"{name} is {reprlib.repr(value)}.")
    return value


def _read_row(data: dict[str, Any]) -> Row:
    spans = [None if data[name] is None else from_plain(Span, data[name]) for name in ("forward", "backward")]
    return Row(str(data["module"]), find_format(data["format"]), spans[0], spans[1], bool(data["blamed"]))


def _unreadable(what: str, error: Exception) -> RescueError:
    words = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
    return RescueError(f"The {what} among the stages cannot be read: {words} Delete the folder's stages.")
