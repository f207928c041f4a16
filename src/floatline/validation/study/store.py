"""Store: a study on the disk as it comes, so that one that was killed goes on, and nothing is repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from floatline.base.files import read_bounded, write_whole
from floatline.base.json_values import plain_json
from floatline.errors import ComparisonError
from floatline.ledger.folder_lock import FolderLock
from floatline.validation.verdict.pairs import ArmRun

_STUDY = "study.json"


class Store:
    """The folder of one study, held by one process at a time.

    `study.json` says what was asked, `runs/ARM/SEED.json` holds one arm run each, and whatever else is written by
    name. Every file is there whole or not at all, also when the machine stops half way.

    Args:
        folder: Made where it is missing.
        asked: What the study is about; one that is resumed must be asked the same.
        resume: Go on with what the folder holds.

    Raises:
        ComparisonError: There is a study and it is not resumed, or none to resume, or one that asked something else.
        LedgerError: Another process holds the folder.
    """

    def __init__(self, folder: str | Path, *, asked: dict[str, Any], resume: bool = False) -> None:
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ComparisonError(
                f"{self.folder} cannot be made: {error.strerror}. Choose another folder (--folder)."
            ) from None
        self._lock = FolderLock(self.folder)
        try:
            self._open(json.loads(json.dumps(plain_json(asked), allow_nan=False)), resume=resume)
        except BaseException:
            self.close()
            raise

    def _open(self, asked: dict[str, Any], *, resume: bool) -> None:
        before = self.read(_STUDY)
        if before is None and resume:
            raise ComparisonError(
                f"There is no study to resume in {self.folder}. Start one without --resume, or give its folder."
            )
        if before is not None and not resume:
            raise ComparisonError(
                f"{self.folder} already holds a study. Resume it (--resume), or choose another folder (--folder)."
            )
        self._asked = asked
        if before is not None:
            _check_same(_mapping(before, "asked", self.folder), asked, self.folder)

    @property
    def found(self) -> dict[str, Any]:
        """What was found out about the target before the first run; empty at first."""
        return _mapping(self.read(_STUDY) or {}, "found", self.folder)

    def settle(self, found: dict[str, Any]) -> None:
        """Keep what was asked and found out, for this run and for those that resume it: the study begins here."""
        self.write(_STUDY, {"asked": self._asked, "found": found})

    def runs(self) -> dict[tuple[str, int], ArmRun]:
        """Every run on the disk by arm and seed, but for those that raised: they are tried again."""
        paths = sorted((self.folder / "runs").glob("*/*.json"))
        runs = [ArmRun.from_json(self.read(str(path.relative_to(self.folder)))) for path in paths]
        return {(run.arm, run.seed): run for run in runs if not run.error}

    def add(self, run: ArmRun) -> None:
        """Keep a run."""
        self.write(f"runs/{file_name(run.arm)}/{run.seed}.json", run.as_json())

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON object of a file in the folder; None where there is none."""
        path = self.folder / name
        try:
            data: object = json.loads(read_bounded(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise ComparisonError(f"{path} cannot be read: {error}. Delete it, and resume the study.") from None
        if not isinstance(data, dict):
            raise ComparisonError(f"{path} holds no JSON object. Delete it, and resume the study.")
        return cast("dict[str, Any]", data)

    def write(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON object, whole or not at all."""
        path = self.folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False))
        except OSError as error:
            raise ComparisonError(
                f"{path} cannot be written: {error.strerror}. Make room, and resume the study (--resume)."
            ) from None

    def close(self) -> None:
        """Give the folder back."""
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def file_name(name: str) -> str:
    """A name of an arm as a file name, on every system."""
    quoted = quote(name, safe=" ")
    return quoted if quoted.strip(". ") else quoted.replace(".", "%2E").replace(" ", "%20")


def _mapping(study: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    part = study.get(name, {})
    if not isinstance(part, dict):
        raise ComparisonError(
            f"{folder / _STUDY} is damaged: '{name}' is not an object. Begin another study (--folder)."
        )
    return cast("dict[str, Any]", part)


def _check_same(before: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    for name in [*before, *(name for name in asked if name not in before)]:
        if name == "code" and before.get(name) != asked.get(name):
            raise ComparisonError(
                f"The code was changed since the study in {folder} was begun. Start another one (--folder): old and "
                "new runs make no pairs."
            )
        if before.get(name) != asked.get(name):
            raise ComparisonError(
                f"The study in {folder} has {name} {_shown(before.get(name))}, which is not the "
                f"{_shown(asked.get(name))} given now. Resume it as it was begun, or choose another folder (--folder)."
            )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
