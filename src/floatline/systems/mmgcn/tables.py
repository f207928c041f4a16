"""Interactions from files: a table of users and items, and one .npy file of features for each modality."""

# numpy's and torch's stubs leave the element types of what is read open.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.mmgcn.interactions import Interactions, split

_TABLES = (".csv", ".tsv", ".inter")
# Names that columns have in the usual data sets, in lower case and without what follows a colon.
_USER = ("user", "user_id", "userid", "uid")
_ITEM = ("item", "item_id", "itemid", "iid")
# How a .npy file begins.
_NPY = b"\x93NUMPY"
# 0 is training, 1 validation, 2 test.
_SPLIT = ("x_label", "split")


def load_interactions(path: str, feature_files: Mapping[str, str], *, holdout: float, seed: int) -> Interactions:
    """Interactions of a table, with features of .npy files.

    Users and items are whole numbers from 0 up; an item's number is its row in the features. A column `x_label` says
    what is training (0), validation (1, which is left out) and test (2); without it, a share is held out by chance.

    Args:
        path: .csv, .tsv or .inter, with tabs where the first line has one, else commas; names in that line, or user
            and item first.
        feature_files: Modality to .npy file.
        holdout: Share held out where there is no such column.
        seed: Of that split.

    Raises:
        TargetError: A file that cannot be used; the line says which, and why.
    """
    if not feature_files:
        raise TargetError("feature_files names no modality. Give at least one .npy file, a row for each item.")
    pairs, labels = _read_table(Path(path))
    features = {name: read_features(Path(file), name) for name, file in feature_files.items()}
    return assemble(pairs, labels, features, feature_files, path=path, num_users=None, holdout=holdout, seed=seed)


def assemble(
    pairs: Tensor,
    labels: Tensor | None,
    features: dict[str, Tensor],
    feature_files: Mapping[str, str],
    *,
    path: str | Path,
    num_users: int | None,
    holdout: float,
    seed: int,
) -> Interactions:
    """Interactions of pairs and features, checked against each other, and split.

    Users without a training interaction are not ranked: nothing is known of them.

    Args:
        pairs: Users and items, of shape (2, E).
        labels: 0 training, 1 validation, 2 test; None splits by chance.
        features: Modality to a row for each item.
        feature_files: Where they are from.
        path: Where the pairs are from.
        num_users: How many there are; None takes those with a pair.
        holdout: Share held out where there are no labels.
        seed: Of that split.
    """
    num_items = _count_items(features, feature_files)
    largest = int(pairs[1].max())
    if largest >= num_items:
        raise TargetError(
            f"'{path}' has item {largest}, but features have {num_items:,} rows, 0 to {num_items - 1}. "
            "Give features of all items."
        )
    num_users = num_users or int(pairs[0].max()) + 1
    keys, first = (pairs[0] * num_items + pairs[1]).unique(return_inverse=True)
    unique = torch.stack([keys // num_items, keys % num_items])
    if labels is None:
        train, held_out = split(unique, holdout=holdout, generator=torch.Generator().manual_seed(seed))
    else:
        # A pair that is there twice counts as training where one of them is.
        label = torch.full((len(keys),), 2).scatter_reduce(0, first, labels, "amin")
        train, held_out = unique[:, label == 0], unique[:, label == 2]
        held_out = held_out[:, torch.isin(held_out[0], train[0])]
    for part, what in ((train, "training"), (held_out, "test")):
        if part.shape[1] == 0:
            raise TargetError(f"'{path}' leaves no interactions for {what}. Check its split, or use more rows.")
    return Interactions(num_users, num_items, train, held_out, features)


def _read_table(path: Path) -> tuple[Tensor, Tensor | None]:
    """Pairs of shape (2, E), and the labels of a split where there are some."""
    if path.suffix not in _TABLES:
        raise TargetError(f"'{path}' is not a table of a known kind. Use {', '.join(_TABLES)}.")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = "\t" if "\t" in file.readline() else ","
            file.seek(0)
            return _read_rows(csv.reader(file, delimiter=separator), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TargetError(f"'{path}' cannot be read: {reason}. Check the path and the file.") from None


def _read_rows(rows: Iterator[list[str]], path: Path) -> tuple[Tensor, Tensor | None]:
    first = next(rows, None)
    if not first:
        raise TargetError(f"'{path}' is empty. It must hold user and item in each line.")
    has_names = not first[0].strip().lstrip("-").isdigit()
    columns = _find_columns(first, path) if has_names else [0, 1]
    numbers: list[list[int]] = [] if has_names else [_read_numbers(first, columns, path, 1)]
    for line, row in enumerate(rows, start=2):
        if row:
            numbers.append(_read_numbers(row, columns, path, line))
    if not numbers:
        raise TargetError(f"'{path}' has names of columns and no interactions. Add some.")
    table = torch.tensor(numbers).T
    return table[:2], table[2] if len(columns) == 3 else None


def _find_columns(names: Sequence[str], path: Path) -> list[int]:
    """Where user, item and, if there is one, the split are; 'user_id:token' is 'user_id'."""
    plain = [name.partition(":")[0].strip().lower() for name in names]
    found = [next((i for i, name in enumerate(plain) if name in known), None) for known in (_USER, _ITEM, _SPLIT)]
    user, item, label = found
    if user is None or item is None:
        missing, known = ("user", _USER) if user is None else ("item", _ITEM)
        raise TargetError(f"'{path}' has no {missing} column among {', '.join(names)}. Name one {' or '.join(known)}.")
    return [user, item] if label is None else [user, item, label]


def _read_numbers(row: Sequence[str], columns: Sequence[int], path: Path, line: int) -> list[int]:
    numbers: list[int] = []
    for column in columns:
        text = row[column].strip() if column < len(row) else ""
        # Beyond 9 digits nothing counts users or items, and products of them leave 64 bits.
        if not text.isdecimal() or len(text) > 9:
            raise TargetError(
                f"'{path}', line {line}: '{text[:40]}' is not a whole number from 0 up. Number users and items."
            )
        numbers.append(int(text))
    return numbers


def load_array(path: Path, what: str, *, advice: str = "Save them with numpy.save.") -> NDArray[Any]:
    """An array of a .npy file that holds numbers; TargetError with the advice where it holds objects, or is another."""
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise TargetError(f"{what} '{path}' cannot be read: {error.strerror or 'not a file'}. Check it.") from None
    except (ValueError, EOFError):
        with path.open("rb") as file:
            pickled = file.read(len(_NPY)) == _NPY
        why = "hold Python objects, which may run anything" if pickled else "are something else"
        raise TargetError(f"{what} '{path}' {why}, not a .npy file of numbers. {advice}") from None
    if not isinstance(array, np.ndarray):
        raise TargetError(f"{what} '{path}' are several arrays, not a .npy file of numbers. {advice}")
    return array


def read_features(path: Path, name: str) -> Tensor:
    """A modality's features, a row for each item."""
    array = load_array(path, "Features")
    if array.ndim != 2 or array.dtype.kind not in "fiu" or 0 in array.shape:
        raise TargetError(
            f"Features '{path}' of {name} have shape {array.shape}. They must be numbers, a row for each item."
        )
    if not np.isfinite(array).all():
        raise TargetError(f"Features '{path}' of {name} hold NaN or inf. Repair or fill those rows.")
    return torch.from_numpy(array.astype(np.float32))


def _count_items(features: Mapping[str, Tensor], files: Mapping[str, str]) -> int:
    counts = {name: len(rows) for name, rows in features.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{files[name]}' {count:,}" for name, count in counts.items())
        raise TargetError(f"Features differ in their rows: {listed}. Each needs a row for each item.")
    return next(iter(counts.values()))
