"""Checkpoint files: tensors as safetensors and the rest as JSON, checksummed, there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline import __version__
from floatline.base.files import hash_file, read_bounded, sync_folder
from floatline.base.plain_values import DAMAGE, decode_state, encode_state, flatten_tensors, unflatten_tensors
from floatline.errors import GuardError
from floatline.ledger.folder_lock import lock_file as lock_file  # pyright: ignore[reportPrivateUsage]

SCHEMA = 1
_MOST_STATE = 1 << 30  # bytes
_TENSORS, _STATE = "tensors.safetensors", "state.json"
_NAME = re.compile(r"checkpoint-(\d{8,})(?:-r(\d+))?")


def save_checkpoint(folder: Path, number: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write one checkpoint: it is there whole, on the disk, or not at all.

    The files are written into a hidden folder beside the checkpoints, synced, and moved into place by one rename.
    Whatever a writer that died has left there is removed. A checkpoint of the same number stays until the new one is
    in place; the new one then has '-r1', '-r2', … behind its number.

    Numerics:
        Every bit of every tensor comes back: all dtypes, NaN payloads, 0-d and empty tensors, and the order in
        memory of dense ones. Names of one and the same tensor share one copy, and are one tensor again when loaded.
        Floats of the state are exact too; of a NaN its payload is not kept. Checked by
        tests/guard/checkpoints/test_run_files.py.

    Args:
        folder: Where the checkpoints of a run lie; made where it is missing.
        number: Step it was made after; it is in the name.
        tensors: Dense tensors by name, on any device. Every name is kept as it is.
        state: None, bool, int, float, str, and lists, tuples and dicts of them.

    Returns:
        The checkpoint's own folder, for `load_checkpoint`.

    Raises:
        GuardError: It cannot be written; older checkpoints are as they were.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GuardError(f"Checkpoint number {number!r} is no count of steps. Give a whole number from 0 up.")
    folder, plain = Path(folder), encode_state(state)
    flat, forms = flatten_tensors(tensors)
    try:
        with _only_writer(folder) as workroom:
            draft = workroom / uuid.uuid4().hex
            draft.mkdir()
            _write_state(draft / _STATE, {})  # its mode is the user's; that of safetensors' file is not
            save_file(flat, draft / _TENSORS)
            (draft / _TENSORS).chmod((draft / _STATE).stat().st_mode & 0o777)
            fields = {"schema": SCHEMA, "floatline": __version__, "number": number}
            fields |= {"tensors_sha256": hash_file(draft / _TENSORS), "forms": forms, "state": plain}
            _write_state(draft / _STATE, {"state_sha256": _hash_fields(fields), **fields})
            _sync_file(draft / _TENSORS)
            sync_folder(draft)
            replaced = [path for path in list_checkpoints(folder) if _order(path)[0] == number]
            revision = _order(replaced[-1])[1] + 1 if replaced else 0
            path = folder / (f"checkpoint-{number:08d}" + (f"-r{revision}" if revision else ""))
            draft.rename(path)
            sync_folder(folder)
            for old in replaced:
                _remove(old, workroom)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise GuardError(
            f"The checkpoint of step {number:,} cannot be written to {folder}: {reason}. "
            "Make room or choose another folder; older checkpoints are untouched."
        ) from None
    return path


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint back, after its checksums.

    Args:
        path: Its folder, as `save_checkpoint` or `newest_checkpoint` gave it.

    Returns:
        The tensors, on the CPU, and the state.

    Raises:
        GuardError: There is none, it is damaged, or a later floatline wrote it. The message names the one before it.
    """
    path = Path(path)
    if not (path / _STATE).is_file():
        newest = newest_checkpoint(path) if path.is_dir() else None
        advice = f"Did you mean {newest}?" if newest else _instead(path)
        raise GuardError(f"{path} is no checkpoint: it has no {_STATE}. {advice}")
    try:
        fields = _read_state(path / _STATE)
        if not (path / _TENSORS).is_file():
            raise ValueError(f"it has no {_TENSORS}")
        if hash_file(path / _TENSORS) != fields["tensors_sha256"]:
            raise ValueError(f"{_TENSORS} does not match its checksum")
        flat: dict[str, Tensor] = load_file(path / _TENSORS)
        state = decode_state(fields["state"])
        if not isinstance(state, dict):
            raise ValueError(f"the state in {_STATE} is no object")
        return unflatten_tensors(flat, fields["forms"]), cast("dict[str, Any]", state)
    except OSError as error:
        raise GuardError(f"Checkpoint {path} cannot be read: {error.strerror}. {_instead(path)}") from None
    except GuardError:
        raise
    except (*DAMAGE, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise GuardError(f"Checkpoint {path} is damaged: {reason}. {_instead(path)}") from None


def load_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint alone, after its checksum; GuardError where it is damaged."""
    try:
        state = decode_state(_read_state(path / _STATE)["state"])
    except OSError as error:
        raise GuardError(f"Checkpoint {path} cannot be read: {error.strerror}. {_instead(path)}") from None
    except GuardError:
        raise
    except DAMAGE as error:
        raise GuardError(f"Checkpoint {path} is damaged: {error!s:.200}. {_instead(path)}") from None
    if not isinstance(state, dict):
        raise GuardError(f"Checkpoint {path} is damaged: the state in {_STATE} is no object. {_instead(path)}")
    return cast("dict[str, Any]", state)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest number in a folder, or None; it is not opened."""
    checkpoints = list_checkpoints(Path(folder))
    return checkpoints[-1] if checkpoints else None


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints of a folder, and what dead writers left there.

    Args:
        folder: Where they lie.
        keep: How many stay, 1 or more.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GuardError(f"keep is {keep!r}. Give the number of checkpoints to keep, 1 or more.")
    surplus = list_checkpoints(Path(folder))[:-keep]
    if not surplus:
        return
    try:
        with _only_writer(folder) as workroom:
            for path in surplus:
                _remove(path, workroom)
    except OSError as error:
        raise GuardError(f"Old checkpoints in {folder} cannot be deleted: {error.strerror}. Delete them.") from None


@contextlib.contextmanager
def _only_writer(folder: Path) -> Generator[Path]:
    """The hidden folder that drafts are made in, held for this process and empty but for its lock, before and after."""
    workroom = Path(folder) / ".saving"
    if workroom.is_symlink():  # all that lies where it leads to would be deleted
        raise GuardError(f"{workroom} is a link. Delete it, or give checkpoints another folder.")
    workroom.mkdir(parents=True, exist_ok=True)
    file = os.open(workroom / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock_file(file)  # the system's: it ends with the process, so whatever else lies here is nobody's
        except BlockingIOError:
            raise GuardError(
                f"Another process is saving a checkpoint in {folder}. Give every process a folder of its own."
            ) from None
        _clear(workroom)
        yield workroom
        _clear(workroom)
    except (OSError, SafetensorError):
        _clear(workroom)  # a full disk gets its room back
        raise
    finally:
        os.close(file)


def _clear(workroom: Path) -> None:
    """Delete drafts and graves; what cannot be deleted now is tried again next time."""
    for leftover in workroom.iterdir():
        if leftover.name != "lock":
            shutil.rmtree(leftover, ignore_errors=True)


def _remove(path: Path, workroom: Path) -> None:
    """Take a checkpoint out of sight by one rename before its files go, so that half of one is never seen."""
    path.rename(workroom / uuid.uuid4().hex)  # deleted with the leftovers


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / _STATE).is_file()]
    return sorted(found, key=_order)


def _order(path: Path) -> tuple[int, int]:
    """Number and revision of a checkpoint; (0, 0) for a folder that was given another name."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)


def _instead(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    before = [other for other in list_checkpoints(path.absolute().parent) if _order(other) < _order(path)]
    return f"Use the one before it: {before[-1]}." if before else "There is none before it: start the run again."


def _write_state(path: Path, fields: dict[str, Any]) -> None:
    with path.open("w", encoding="ascii") as file:
        json.dump(fields, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _read_state(path: Path) -> dict[str, Any]:
    """The fields of a state file that is whole and of a schema that is known; ValueError for any other."""
    try:
        fields = json.loads(read_bounded(path, most=_MOST_STATE))
    except (ValueError, RecursionError):
        raise ValueError(f"{_STATE} is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{_STATE} holds no object")
    known = cast("dict[str, Any]", fields)
    schema = known.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise GuardError(
            f"Checkpoint {path.parent} has schema {schema!r:.40}, and this floatline {__version__} reads {SCHEMA}. "
            f"Use floatline {str(known.get('floatline'))[:40]} or later."
        )
    checksum = known.pop("state_sha256", None)
    if checksum != _hash_fields(known):
        raise ValueError(f"{_STATE} does not match its checksum")
    return known


def _hash_fields(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode("ascii")).hexdigest()


def _sync_file(path: Path) -> None:
    file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(file)
    finally:
        os.close(file)
