"""What is computed once for all processes of a test run: by whichever asks first; the others wait, and read it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

_FOLDERS: list[Path] = []


def begin(factory: pytest.TempPathFactory) -> None:
    """A test run begins: what its processes share lies beside the folder of each."""
    base = factory.getbasetemp()
    _FOLDERS[:] = [(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"]


@cache
def once(name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` gives, as JSON gives it back; where it fails it is not tried again, and every test fails with it.

    Args:
        name: A name of its own in the whole suite.
        make: Gets a folder that stays as long as those of other tests.
    """
    folder = _FOLDERS[0] / name
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "found.json"
    with FileLock(folder / "lock"):
        if not kept.exists():
            try:
                found = {"found": make(folder)}
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
            partial = kept.with_suffix(".partial")
            partial.write_text(json.dumps(found), "utf-8")
            partial.replace(kept)
    found = json.loads(kept.read_text("utf-8"))
    assert "failed" not in found, found["failed"]
    return found["found"]


def folder_of(name: str) -> Path:
    """The folder that `make` got."""
    return _FOLDERS[0] / name
