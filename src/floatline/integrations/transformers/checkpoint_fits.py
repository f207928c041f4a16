"""Fits of a folder of checkpoints: one row for each, kept in a file, so that a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from floatline.base.files import read_bounded, write_whole
from floatline.base.json_values import plain_json
from floatline.errors import FoldError
from floatline.folding.model_fit import fit_model
from floatline.integrations.transformers.checkpoint_folders import load_checkpoint

_KIND = "floatline fit 1"


@dataclass(frozen=True)
class GivenInputs:
    """Arguments of a forward pass that a file of the user's makes.

    Args:
        file: The file, whose content a row depends on.
        values: The arguments.
    """

    file: str
    values: Any


def find_checkpoints(folder: str | Path) -> list[Path]:
    """Folders with a config.json, the given one too, in order of their names.

    Raises:
        FoldError: There are none.
    """
    root = Path(folder)
    found = sorted(path.parent for path in root.rglob("config.json") if list(path.parent.glob("*.safetensors")))
    if not found:
        raise FoldError(f"'{folder}' holds no checkpoint: no folder with config.json and .safetensors files.")
    return found


def fit_checkpoints(
    folder: str | Path,
    tokens: str | Path | None,
    *,
    inputs: GivenInputs | None = None,
    margin: float,
    log: str | Path,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Fit every checkpoint below a folder; those that the log has for the same files, tokens and margin are not run.

    Args:
        folder: Where the checkpoints are.
        tokens: What they are run on, as for `load_checkpoint`.
        inputs: What those are run on that take no tokens.
        margin: How many times larger than measured a value may become.
        log: JSON file that keeps the rows; it is written after each checkpoint.
        progress: Told what is being done.
    """
    places = find_checkpoints(folder)
    known = _read_log(Path(log))
    rows: list[dict[str, Any]] = []
    for number, place in enumerate(places):
        name = place.relative_to(folder).as_posix() if place != Path(folder) else place.name
        progress(f"checkpoint {number + 1} of {len(places)}: {name}")
        key = _identify(place, [Path(one) for one in (tokens, inputs and inputs.file) if one is not None], margin)
        given = None if inputs is None else inputs.values
        row = known.get(key) or {"key": key, "checkpoint": name} | _fit_one(place, tokens, given, margin)
        rows.append(row | {"checkpoint": name})
        known[key] = row
        _write_log(Path(log), list(known.values()))
    return rows


def _fit_one(place: Path, tokens: str | Path | None, inputs: Any, margin: float) -> dict[str, Any]:
    try:
        checkpoint = load_checkpoint(place, tokens, inputs=inputs)
        found = fit_model(checkpoint.model, checkpoint.inputs, margin=margin, shared_eps=checkpoint.eps)
    except FoldError as error:
        return {"verdict": "cannot be tried", "error": str(error)}
    return found.as_json()


def _identify(place: Path, given: Sequence[Path], margin: float) -> str:
    """What a row depends on: the files by name, size and time, the tokens and the code of inputs by content."""
    digest = hashlib.sha256(f"{margin}".encode())
    try:
        for path in given:
            digest.update(read_bounded(path))
        files = [place / "config.json", *sorted(place.glob("*.safetensors"))]
        for path in files:
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    except OSError as error:
        raise FoldError(f"'{error.filename or place}' cannot be read: {error}.") from None
    return digest.hexdigest()


def _read_log(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        found: Any = json.loads(read_bounded(path))
        rows = cast("list[dict[str, Any]]", found["rows"] if found["kind"] == _KIND else None)
        return {str(row["key"]): row for row in rows if isinstance(row["verdict"], str)}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise FoldError(f"'{path}' is no log of floatline fit. Name another file by --log, or remove it.") from None


def _write_log(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        write_whole(path, json.dumps(plain_json({"kind": _KIND, "rows": rows}), indent=1, allow_nan=False))
    except OSError as error:
        raise FoldError(f"'{path}' cannot be written: {error}. Name another file by --log.") from None
