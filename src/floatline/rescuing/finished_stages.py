"""Kept: what a rescue has finished, on the disk stage by stage, so that one that was ended goes on where it was."""

from __future__ import annotations

import json
import reprlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from floatline.base.files import read_bounded, write_whole
from floatline.base.json_values import plain_json
from floatline.base.plain_records import from_plain, to_plain
from floatline.causes import find_cause
from floatline.diagnosis.detectors.loss_scale import ScaleVerdict
from floatline.diagnosis.headroom.step_rows import Row, Span
from floatline.diagnosis.islands.island import Island
from floatline.diagnosis.result import Diagnosis
from floatline.errors import CauseError, ComparisonError, FormatError, RescueError
from floatline.findings import Finding
from floatline.formats import find_format
from floatline.ledger.folder_lock import FolderLock
from floatline.rescuing.short_run import Trial

RESULTS = ("plan.yaml", "fix.patch", "rescue.json", "report.html")
"""What a rescue leaves for people, beside its stages."""

_STAGES, _ASKED, _FINISHED = "stages", "asked", "finished"
_CHANGES = {
    "code": "the code was changed",
    "steps": "other steps are asked for",
    "seed": "another seed is asked for",
    "environment": "floatline, torch or the hardware is another",
}


class Kept:
    """The stages of one rescue, held by one process at a time.

    `stages/NAME.json` holds a stage, whole or not at all. A rescue that was ended goes on with them; one that came to
    its end is made again, unless the proof that it did not give is asked for. Stages of other code, steps, seed or
    environment are thrown away.

    Args:
        folder: Of the rescue; made where it is missing. None keeps nothing.
        asked: 'target', 'code', 'steps', 'seed' and 'environment'.
        prove: Whether the full validation is asked for.

    Attributes:
        note: Why what was there is not used; '' where it is, or nothing was.

    Raises:
        RescueError: The folder holds another target's rescue, or files that are no rescue's, or cannot be used.
        LedgerError: Another process holds the folder.
    """

    def __init__(self, folder: Path | None, *, asked: dict[str, Any], prove: bool) -> None:
        self.note = ""
        self._place = None if folder is None else folder.absolute() / _STAGES
        self._lock: FolderLock | None = None
        if folder is None:
            return
        refuse_foreign(folder)
        asked = json.loads(json.dumps(plain_json(asked), allow_nan=False))
        try:
            self._stages.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._stages)
        except OSError as error:
            raise RescueError(f"'{folder}' cannot be used: {error.strerror}. Choose another (--folder).") from None
        try:
            self._open(folder, asked, prove=prove)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, asked: dict[str, Any], *, prove: bool) -> None:
        before, finished = self.get(_ASKED), self.get(_FINISHED)
        if before is not None and before.get("target") != asked["target"]:
            raise RescueError(
                f"'{folder}' holds a rescue of '{str(before.get('target'))[:200]}'. Choose another folder (--folder)."
            )
        changed = [words for name, words in _CHANGES.items() if (before or {}).get(name) != asked.get(name)]
        done = finished is not None and not (prove and finished.get("proved") is False)
        if before is None or changed or done:
            self.note = f"What was found before is not used: {changed[0]}." if before and changed and not done else ""
            self._clear()
            self.put(_ASKED, asked)
        else:
            (self._stages / f"{_FINISHED}.json").unlink(missing_ok=True)

    def _clear(self) -> None:
        for path in self._stages.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "ledger.lock":
                path.unlink()

    def get(self, name: str, **holds: type | tuple[type, ...]) -> dict[str, Any] | None:
        """A stage that is finished; None where it is not.

        Args:
            name: Of the stage.
            holds: What it must hold, each with its type.
        """
        if self._place is None:
            return None
        path = self._stages / f"{name}.json"
        try:
            data: object = json.loads(read_bounded(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise RescueError(f"'{path}' cannot be read: {error}. Delete it, and run the command again.") from None
        if not isinstance(data, dict):
            raise RescueError(f"'{path}' holds no JSON object. Delete it, and run the command again.")
        fields = cast("dict[str, Any]", data)
        wrong = next((key for key, kind in holds.items() if key not in fields or not isinstance(fields[key], kind)), "")
        if wrong:
            raise RescueError(f"'{path}' has no '{wrong}', or a wrong one. Delete it, and run the command again.")
        return fields

    def put(self, name: str, data: dict[str, Any]) -> None:
        """Keep a stage."""
        if self._place is not None:
            _write(self._stages / f"{name}.json", data)

    def folder(self, name: str) -> Path | None:
        """A folder among the stages, for what keeps its own files; None where nothing is kept."""
        return None if self._place is None else self._stages / name

    @property
    def _stages(self) -> Path:
        if self._place is None:
            raise AssertionError  # asked for only where something is kept
        return self._place

    def close(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_foreign(folder: Path) -> None:
    """RescueError where results would be written over files that are no rescue's."""
    if folder.exists() and not folder.is_dir():
        raise RescueError(f"'{folder}' is a file. Name a folder (--folder).")
    stages = folder / _STAGES
    # What a link leads to would be written over, or deleted, when the rescue goes on.
    linked = next((path for path in (stages, *(folder / name for name in RESULTS)) if path.is_symlink()), None)
    if linked is None and stages.is_dir():
        linked = next((path for path in stages.iterdir() if path.is_symlink()), None)
    if linked is not None:
        raise RescueError(f"'{linked}' is a link. Delete it, or choose another folder (--folder).")
    if (stages / f"{_ASKED}.json").exists() or (folder / "rescue.json").exists():
        return
    # A rescue that was killed before its first word has left an empty folder, or one with a lock alone.
    strange = [name for name in RESULTS if (folder / name).exists()]
    if stages.exists() and (not stages.is_dir() or {path.name for path in stages.iterdir()} - {"ledger.lock"}):
        strange.append(_STAGES)
    if strange:
        raise RescueError(f"'{folder}' holds a {strange[0]} that is no rescue's. Choose another folder (--folder).")


def finish(folder: Path, *, proved: bool) -> None:
    """Say that the results of a rescue are written: the same command makes it again from now on."""
    stages = folder / _STAGES
    if stages.is_dir():
        _write(stages / f"{_FINISHED}.json", {"proved": proved})


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))
    except OSError as error:
        raise RescueError(f"'{path}' cannot be written: {error.strerror}. Make room, and run it again.") from None


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


def plain_patch(diagnosis: Diagnosis) -> dict[str, Any]:
    """What came of trying changes of the code for the primary finding, as JSON can hold it."""
    primary = diagnosis.findings[0]
    fixes = [{**to_plain(fix), "file": str(fix.file)} for fix in diagnosis.fixes]
    return {"fix": primary.fix, "patch": primary.patch, "tried": primary.tried, "fixes": fixes}


def read_patch(diagnosis: Diagnosis, data: dict[str, Any]) -> Diagnosis:
    """The diagnosis with what `plain_patch` was given; RescueError for anything else."""
    from floatline.fixes.code_fix import CodeFix  # brings a parser of Python with it

    try:
        words = {name: _checked(data, name) for name in ("fix", "patch", "tried")}
        fixes = tuple(from_plain(CodeFix, entry) for entry in data["fixes"])
    except (LookupError, TypeError, ValueError, ComparisonError) as error:
        raise _unreadable("patch", error) from None
    primary = replace(diagnosis.findings[0], **words)
    return replace(diagnosis, findings=(primary, *diagnosis.findings[1:]), fixes=fixes)


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
