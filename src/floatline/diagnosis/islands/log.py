"""SearchLog: every set that a search has tried and what came of it, as JSON lines, so that a killed search goes on."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from floatline.errors import ReplayError
from floatline.precision.nested import find_tensors
from floatline.precision.user_frames import is_users
from floatline.probe.steps.capture import CapturedStep

_FILE = "search.jsonl"


class SearchLog:
    """What was found so far, by step and question; kept in a folder, or in memory only.

    Each answer is one line, written at once. A last line that a kill cut off is left out. Answers that belong to
    another step, to other code or to another tolerance stay in the file and are not used.

    Args:
        folder: Where `search.jsonl` lies; None keeps nothing.

    Raises:
        ReplayError: The folder cannot be made or read.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._path = None if folder is None else Path(folder) / _FILE
        self._known: dict[str, Any] = {}
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            if text and not text.endswith("\n"):  # what comes next must not be glued to a line that was cut off
                text = text[: text.rfind("\n") + 1]
                self._path.write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ReplayError(f"The search cannot be kept in '{folder}': {error}. Choose another folder.") from None
        self._known = dict(row for line in text.splitlines() if (row := _read(line)) is not None)

    def get(self, key: str) -> Any | None:
        """The answer to a question, as JSON; None where it was not asked yet."""
        return self._known.get(key)

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer."""
        self._known[key] = answer
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "answer": answer}) + "\n")
        except OSError as error:
            raise ReplayError(f"The search cannot be kept in '{self._path}': {error.strerror}.") from None


def _read(line: str) -> tuple[str, Any] | None:
    """Question and answer of one line; None where it is none."""
    try:
        row: Any = json.loads(line)
        return str(row["key"]), row["answer"]
    except (ValueError, TypeError, KeyError):
        return None


def key_of(step: CapturedStep, settings: Mapping[str, Any]) -> str:
    """A text that tells a step, its code and the settings of a search from others.

    Tensors count by shape, dtype, sum and sum of squares, so that nothing large leaves a device.
    """
    tensors = {**step.state.captured, **step.state.captured_buffers}
    parts: list[Any] = [sorted(settings.items()), step.plan.model_dump(mode="json"), step.scale]
    parts += [[name, *_digest(t)] for name, t in tensors.items()]
    parts += [_digest(t) for t in find_tensors(*step.batches)]
    parts += [repr(step.model), _hash_code(step), hashlib.sha256(step.random_state.host.numpy().tobytes()).hexdigest()]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:24]


def _digest(tensor: Tensor) -> list[Any]:
    shape = [str(tensor.dtype), list(tensor.shape)]
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.is_complex():
        return shape
    wide = tensor.detach().double()
    return [*shape, *torch.stack([wide.sum(), wide.square().sum()]).tolist()]


def _hash_code(step: CapturedStep) -> str:
    """Of the files that the model's own classes are written in."""
    files: set[str] = set()
    for kind in {type(module) for module in step.model.modules()}:
        try:
            file = inspect.getsourcefile(kind)
        except (TypeError, OSError):
            continue
        if file and is_users(file) and Path(file).is_file():
            files.add(file)
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def question(step_key: str, what: str, modules: Sequence[str] = (), lines: Sequence[tuple[str, int]] = ()) -> str:
    """The key of one answer."""
    return json.dumps([step_key, what, list(modules), [list(line) for line in lines]])
