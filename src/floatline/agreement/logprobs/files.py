"""Files of log-probs that another engine made: JSON Lines or safetensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline.base.files import read_bounded
from floatline.errors import ParityError

_FORMS = (
    'Give JSON Lines with {"tokens": [5, 9, 2], "logprobs": [-1.2, -0.3]} for each sequence, or safetensors with '
    "'tokens' and 'logprobs'."
)
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Scored:
    """One sequence with the log-probs of its last tokens.

    Args:
        tokens: The ids, prompt first.
        logprobs: Of the last so many tokens, in float64; NaN where the file has none.
    """

    tokens: Tensor
    logprobs: Tensor

    @property
    def start(self) -> int:
        """The position of the first token with a log-prob."""
        return len(self.tokens) - len(self.logprobs)


def read_scored(path: str | Path) -> list[Scored]:
    """Read a file of log-probs; nothing in it is run.

    Raises:
        ParityError: It cannot be read, or holds something else.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            found = _from_tensors(load_file(path), path)
        else:
            found = _from_lines(read_bounded(path, most=_MOST_BYTES).decode(), path)
    except (OSError, SafetensorError, UnicodeDecodeError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
        raise ParityError(f"'{path}' cannot be read: {reason}. {_FORMS}") from None
    if not any(bool(one.logprobs.isfinite().any()) for one in found):
        raise ParityError(f"'{path}' holds no log-prob. {_FORMS}")
    return found


def _from_lines(text: str, path: Path) -> list[Scored]:
    found: list[Scored] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            raise ParityError(f"Line {number} of '{path}' is not JSON. {_FORMS}") from None
        row = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        tokens, logprobs = row.get("tokens"), row.get("logprobs")
        if not _is_row(tokens, int) or not _is_row(logprobs, int, float, type(None)):
            raise ParityError(f"Line {number} of '{path}' has no lists 'tokens' and 'logprobs' of numbers. {_FORMS}")
        values = [math.nan if value is None else float(value) for value in logprobs]
        found.append(_check(torch.tensor(tokens), torch.tensor(values, dtype=torch.float64), f"line {number}", path))
    return found


def _is_row(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kinds) and not isinstance(item, bool) for item in cast("list[Any]", value)
    )


def _from_tensors(tensors: dict[str, Tensor], path: Path) -> list[Scored]:
    missing = [name for name in ("tokens", "logprobs") if name not in tensors]
    if missing:
        raise ParityError(f"'{path}' has no tensor '{missing[0]}', but {', '.join(tensors) or 'nothing'}. {_FORMS}")
    tokens, logprobs = tensors["tokens"].long(), tensors["logprobs"].double()
    if tokens.dim() != 2 or logprobs.dim() != 2 or len(tokens) != len(logprobs):
        raise ParityError(
            f"'tokens' of '{path}' is {tuple(tokens.shape)} and 'logprobs' {tuple(logprobs.shape)}: both must be "
            "sequences by positions."
        )
    if "mask" in tensors:
        if tensors["mask"].shape != logprobs.shape:
            raise ParityError(
                f"'mask' of '{path}' is {tuple(tensors['mask'].shape)}: it must have the shape of 'logprobs', "
                f"{tuple(logprobs.shape)}."
            )
        logprobs = logprobs.masked_fill(~tensors["mask"].bool(), math.nan)
    return [_check(*row, f"row {number}", path) for number, row in enumerate(zip(tokens, logprobs, strict=True))]


def _check(tokens: Tensor, logprobs: Tensor, place: str, path: Path) -> Scored:
    if len(tokens) == len(logprobs) and len(tokens):
        logprobs = logprobs[1:]  # nothing comes before the first token: engines write a placeholder
    if not len(tokens) > len(logprobs) > 0:
        raise ParityError(
            f"In {place} of '{path}', {len(logprobs)} log-probs stand beside {len(tokens)} tokens: they are those of "
            "the last tokens, and there is at least one."
        )
    high = float(logprobs.nan_to_num(-1.0).max())
    if high > 1e-3:
        raise ParityError(f"In {place} of '{path}', a log-prob is {high:.3g}, above 0. Give natural logarithms.")
    return Scored(tokens, logprobs)
