"""CSVLogger and JSONLLogger: rows in a file that everything can read."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from floatline.base.json_values import encode_number
from floatline.errors import GuardError
from floatline.integrations.loggers.logger import Logger, Row


class CSVLogger(Logger):
    """A table with a column for each name; an empty cell where a row has no such number.

    A name that comes later adds a column: the file is then written again, in one step. Words have no column. A file
    that is there already is gone on with.

    Args:
        path: The file.
        every: Steps between two rows; see `Logger`.
    """

    def __init__(self, path: str | Path, *, every: int = 10) -> None:
        super().__init__(every=every)
        self.path = Path(path).absolute()  # the run may change its working directory
        _make_folder(self.path)
        self._names: list[str] = []
        if self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                self._names = next(csv.reader(file), list[str]())

    def _send(self, rows: Sequence[Row]) -> None:
        told = [row for row in rows if row.values]
        seen = ["step", *dict.fromkeys(name for row in told for name in row.values)]
        new = [name for name in seen if name not in self._names]
        if told and new:
            self._widen([*self._names, *new])
        with self.path.open("a", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, self._names)
            table.writerows({"step": row.step, **row.values} for row in told)

    def _widen(self, names: list[str]) -> None:
        """Put the file in place with more columns."""
        old: list[dict[str, str]] = []
        if self._names and self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                old = list(csv.DictReader(file))
        draft = self.path.with_name(f".{self.path.name}.partial")
        with draft.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(old)
        draft.replace(self.path)
        self._names = names

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        pass  # a table has no place for it; the ledger's header has one

    def _finish(self) -> None:
        pass


class JSONLLogger(Logger):
    """One JSON object a row: `step` and the numbers, or `step` and `event`.

    Numerics:
        Numbers are exact; NaN and infinity are the strings "NaN", "Infinity" and "-Infinity", as in the ledger.

    Args:
        path: The file; gone on with where it is there already.
        every: Steps between two rows; see `Logger`.
    """

    def __init__(self, path: str | Path, *, every: int = 10) -> None:
        super().__init__(every=every)
        self.path = Path(path).absolute()  # the run may change its working directory
        _make_folder(self.path)

    def _send(self, rows: Sequence[Row]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                fields: dict[str, Any] = {name: encode_number(value) for name, value in row.values.items()}
                fields = {"step": row.step, **fields} | ({"event": row.text} if row.text else {})
                file.write(json.dumps(fields, allow_nan=False) + "\n")

    def _describe(self, metadata: Mapping[str, Any]) -> None:
        pass  # rows only; the ledger's header has it

    def _finish(self) -> None:
        pass


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise GuardError(f"{path} cannot be written: {error.strerror}. Choose another file.") from None
