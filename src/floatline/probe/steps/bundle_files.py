"""The files of a replay bundle: safetensors and JSON in a folder, there whole or not at all, trusted in nothing."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline import __version__
from floatline.base.files import hash_file
from floatline.base.plain_values import DAMAGE, decode_state, encode_state, flatten_tensors, unflatten_tensors
from floatline.errors import GuardError, ReplayError

SCHEMA = 1
JSON, STATE, DATA = "bundle.json", "state.safetensors", "data.safetensors"
_MOST_JSON = 64 << 20  # bytes; a bundle's own is some 20 kB
_TENSOR = "$tensor"


def write_files(folder: Path, fields: dict[str, Any], parts: Mapping[str, dict[str, Tensor]]) -> Path:
    """Write a bundle into a folder that does not exist, or is empty: all of it, or nothing.

    Args:
        folder: Where.
        fields: What goes into the JSON file.
        parts: Tensors by name, for each of the tensor files.

    Raises:
        ReplayError: It cannot be written.
    """
    folder = folder.absolute()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists() or folder.is_symlink():
        raise ReplayError(f"'{folder}' exists already. Give a bundle a folder of its own.")
    draft = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        draft.mkdir(parents=True)
        files: dict[str, Any] = {}
        forms: dict[str, Any] = {}
        for name, tensors in parts.items():
            flat, forms[name] = flatten_tensors(tensors)
            save_file(flat, draft / name)
            (draft / name).chmod(0o644)
            files[name] = {"sha256": hash_file(draft / name), "bytes": (draft / name).stat().st_size}
        whole = {"schema": SCHEMA, "floatline": __version__, "files": files, "forms": forms, **fields}
        with (draft / JSON).open("w", encoding="ascii") as file:
            json.dump(encode_state(whole, "the bundle"), file, allow_nan=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ReplayError(f"The bundle cannot be written to '{folder}': {reason}. Choose another folder.") from None
    except GuardError as error:
        raise ReplayError(str(error).replace("a checkpoint cannot hold", "a bundle cannot hold")) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON fields of a bundle and all its tensors, on the CPU, after their checksums.

    Raises:
        ReplayError: There is no bundle, it is damaged, or a later floatline wrote it.
    """
    if (folder / JSON).is_symlink() or not (folder / JSON).is_file():
        raise ReplayError(f"'{folder}' is no replay bundle: it has no {JSON}. Give a folder that --bundle wrote.")
    try:
        fields = _read_json(folder / JSON)
        schema = fields.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise ReplayError(f"Bundle '{folder}' has schema {schema}; this floatline reads {SCHEMA}. Use a later one.")
        if schema != SCHEMA:
            raise ValueError(f"{JSON} has no schema that is known")
        fields = cast("dict[str, Any]", decode_state(fields))
        tensors: dict[str, Tensor] = {}
        for name, facts in fields["files"].items():
            if name not in (STATE, DATA):
                raise ValueError(f"it names a file {name!r:.40}")
            tensors |= _read_tensors(folder / name, facts, fields["forms"].get(name, {}))
        return fields, tensors
    except OSError as error:
        raise ReplayError(f"Bundle '{folder}' cannot be read: {error.strerror}. Check its files.") from None
    except (*DAMAGE, SafetensorError) as error:
        if isinstance(error, ReplayError):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ReplayError(f"Bundle '{folder}' is damaged: {reason}. Write it again.") from None


def pack(tree: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """The same structure with every tensor replaced by its name, and the tensors."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"{prefix}.{len(tensors)}"
            tensors[name] = value.detach()
            return {_TENSOR: name}
        if isinstance(value, dict):
            return {key: walk(item) for key, item in cast("dict[Any, Any]", value).items()}
        if type(value) in (list, tuple):
            return type(value)(walk(item) for item in value)
        return value

    return walk(tree), tensors


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given; KeyError where a tensor is missing."""
    if isinstance(tree, dict):
        fields = cast("dict[Any, Any]", tree)
        if list(fields) == [_TENSOR]:
            return tensors[fields[_TENSOR]]
        return {key: unpack(item, tensors) for key, item in fields.items()}
    if isinstance(tree, list | tuple):
        return type(cast("list[Any]", tree))(unpack(item, tensors) for item in cast("list[Any]", tree))
    return tree


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_JSON:
        raise ValueError(f"{JSON} has more than {_MOST_JSON >> 20} MiB")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{JSON} is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{JSON} holds no object")
    return cast("dict[str, Any]", fields)


def _read_tensors(path: Path, facts: dict[str, Any], forms: dict[str, Any]) -> dict[str, Tensor]:
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} is missing")
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, not {facts['bytes']:,}")
    if hash_file(path) != facts["sha256"]:
        raise ValueError(f"{path.name} does not match its checksum")
    flat: dict[str, Tensor] = load_file(path)
    return unflatten_tensors(flat, forms)
