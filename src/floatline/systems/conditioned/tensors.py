"""A user's own sequences: a .npz or .safetensors file with tokens, categories and accuracies."""

# numpy's stubs leave the element types of what is read open.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.conditioned.data import IGNORED, Sequences

_NAMES = ("tokens", "categories", "accuracies")


def load_sequences(path: str, *, held_out: int, seed: int) -> tuple[int, Sequences, Sequences]:
    """How many tokens there are, the sequences to train on, and those held out, which are chosen by chance.

    `tokens` are whole numbers of shape (n, length), each row a sequence, padded at its end with -1; `categories` of
    shape (n,) are whole numbers from 0 up; `accuracies` of shape (n,) or (n, several) lie in [0, 1].

    Raises:
        TargetError: A file that cannot be used; the line says why.
    """
    found = _read(Path(path))
    missing = next((name for name in _NAMES if name not in found), None)
    if missing is not None:
        raise TargetError(f"data_file '{path}' has no '{missing}'. It must hold {', '.join(_NAMES)}.")
    tokens, categories, accuracies = (found[name] for name in _NAMES)
    accuracies = accuracies[:, None] if accuracies.ndim == 1 else accuracies
    _check(path, tokens, categories, accuracies)
    if held_out >= len(tokens):
        raise TargetError(f"data_file '{path}' has {len(tokens)} sequences, and held_out is {held_out}. Lower it.")
    vocabulary = int(tokens.max()) + 1
    padded, tokens = tokens < 0, tokens.long()
    whole = Sequences(
        tokens.masked_fill(padded, vocabulary)[:, :-1],
        accuracies.float(),
        categories.long(),
        tokens.masked_fill(padded, IGNORED)[:, 1:],
    )
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    return vocabulary, whole.rows(order[held_out:]), whole.rows(order[:held_out])


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files if name in _NAMES}
    except OSError as error:
        raise TargetError(f"data_file '{path}' cannot be read: {error.strerror or 'not a file'}. Check it.") from None
    except (ValueError, TypeError, AttributeError, EOFError, SafetensorError):
        raise TargetError(
            f"data_file '{path}' holds no plain tensors. Give .npz of numbers, or .safetensors."
        ) from None


def _check(path: str, tokens: Tensor, categories: Tensor, accuracies: Tensor) -> None:
    num = len(tokens) if tokens.ndim else 0
    whole = not (tokens.is_floating_point() or categories.is_floating_point())
    if not whole or tokens.ndim != 2 or num == 0 or tokens.shape[1] < 2 or int(tokens.max()) < 1:
        raise TargetError(
            f"data_file '{path}' has tokens {tuple(tokens.shape)} of {tokens.dtype}, categories of {categories.dtype}. "
            "They must be whole numbers, tokens in rows of two or more."
        )
    if categories.shape != (num,) or accuracies.ndim != 2 or len(accuracies) != num or 0 in accuracies.shape:
        raise TargetError(
            f"data_file '{path}' has {num} rows of tokens, categories {tuple(categories.shape)} and accuracies "
            f"{tuple(accuracies.shape)}. They must be as many."
        )
    if int(categories.min()) < 0:
        raise TargetError(f"data_file '{path}' has category {int(categories.min())}. Number them from 0 up.")
    wrong = ~((accuracies >= 0) & (accuracies <= 1))
    if bool(wrong.any()):
        raise TargetError(f"data_file '{path}' has accuracy {float(accuracies[wrong][0])}. They must be in [0, 1].")
    gap = (tokens[:, 1:] >= 0) & (tokens[:, :-1] < 0)
    if bool(gap.any()):
        row = int(gap.any(1).nonzero()[0, 0])
        raise TargetError(f"data_file '{path}', row {row}: a token follows padding. Pad sequences at their end.")
