"""Folders of data as other code has them: MMRec's (.inter) and MMGCN's own (train.npy), each with *_feat.npy."""

# numpy's and torch's stubs leave the element types of what is read open.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from floatline.errors import TargetError
from floatline.systems.mmgcn.interactions import Interactions
from floatline.systems.mmgcn.tables import assemble, load_array, load_interactions, read_features

# File names of a modality, in MMRec, in MMGCN, and in its Movielens data.
_FEATURES = {
    "visual": ("image_feat.npy", "v_feat.npy", "FeatureVideo_normal.npy"),
    "acoustic": ("audio_feat.npy", "a_feat.npy", "FeatureAudio_avg_normal.npy"),
    "textual": ("text_feat.npy", "t_feat.npy", "FeatureText_stl_normal.npy"),
}
_TRUSTED = "Convert it once, where you trust it, with: python -c \"import numpy as np; np.save('{to}', {how})\"."
_PAIRS = "np.load('train.npy', allow_pickle=True).astype(int)"
_ROWS = "[(r[0], i) for r in np.load('test_full.npy', allow_pickle=True) for i in r[1:]]"


def load_folder(
    folder: Path,
    table: str | None,
    feature_files: Mapping[str, str],
    *,
    first_item: int | None,
    holdout: float,
    seed: int,
) -> Interactions:
    """Interactions and features of a folder.

    Args:
        folder: Where they lie.
        table: Name of the table; None takes `train.npy`, or the folder's `.inter` file.
        feature_files: Modality to file name; empty takes those with a usual name.
        first_item: Number of the first item, where items are numbered after the users as in MMGCN's files; None takes
            the smallest that fits.
        holdout: Share held out where no file says what is.
        seed: Of that split.

    Raises:
        TargetError: A folder or file that cannot be used; the line says which, and why.
    """
    if not folder.is_dir():
        raise TargetError(f"dataset '{folder}' is no folder. Give its path, or its name below data_path.")
    named = dict(feature_files) or {
        modality: next(name for name in names if (folder / name).is_file())
        for modality, names in _FEATURES.items()
        if any((folder / name).is_file() for name in names)
    }
    if not named:
        names = ", ".join(name for each in _FEATURES.values() for name in each[:2])
        raise TargetError(f"dataset '{folder}' has no features. Name them in feature_files, or use one of {names}.")
    paths = {modality: str(folder / name) for modality, name in named.items()}
    if table is None and (folder / "train.npy").is_file():
        return _load_numbers(folder, paths, first_item=first_item, holdout=holdout, seed=seed)
    return load_interactions(str(_find_table(folder, table)), paths, holdout=holdout, seed=seed)


def _find_table(folder: Path, table: str | None) -> Path:
    if table is not None:
        return folder / table
    found = [folder / f"{folder.name}.inter"] if (folder / f"{folder.name}.inter").is_file() else []
    found = found or sorted(folder.glob("*.inter"))
    if len(found) != 1:
        what = "several .inter files" if found else "no .inter file and no train.npy"
        raise TargetError(f"dataset '{folder}' has {what}. Name the table in interaction_file.")
    return found[0]


def _load_numbers(
    folder: Path, feature_files: Mapping[str, str], *, first_item: int | None, holdout: float, seed: int
) -> Interactions:
    """The files of github.com/weiyinwei/MMGCN: pairs (user, item), items numbered after the users."""
    features = {name: read_features(Path(file), name) for name, file in feature_files.items()}
    num_items = len(next(iter(features.values())))
    train = _read_pairs(folder / "train.npy", _PAIRS)
    held_out = next(
        (_read_pairs(folder / n, _ROWS) for n in ("test.npy", "test_full.npy") if (folder / n).is_file()), None
    )
    pairs = train if held_out is None else torch.cat([train, held_out], 1)
    first = _find_first_item(pairs, num_items, first_item, folder)
    labels = (
        None
        if held_out is None
        else torch.tensor([0, 2]).repeat_interleave(torch.tensor([train.shape[1], held_out.shape[1]]))
    )
    moved = torch.stack([pairs[0], pairs[1] - first])
    return assemble(
        moved, labels, features, feature_files, path=folder / "train.npy", num_users=first or None,
        holdout=holdout, seed=seed,
    )  # fmt: skip


def _find_first_item(pairs: Tensor, num_items: int, given: int | None, folder: Path) -> int:
    """What is taken from the numbers of items; 0 where they begin at 0."""
    lowest, highest, users = int(pairs[1].min()), int(pairs[1].max()), int(pairs[0].max()) + 1
    if given is None:
        given = 0 if highest < num_items else max(users, highest - num_items + 1)
    if not given <= lowest or highest >= given + num_items or 0 < given < users:
        raise TargetError(
            f"'{folder}' has items {lowest} to {highest}, users 0 to {users - 1}, and features of {num_items} items: "
            f"the first item cannot be {given}. Give features of all items, or another first_item."
        )
    return given


def _read_pairs(path: Path, how: str) -> Tensor:
    array = load_array(path, "Interactions", advice=_TRUSTED.format(to=path.name.replace("_full", ""), how=how))
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu" or 0 in array.shape or array.min() < 0:
        raise TargetError(
            f"Interactions '{path}' have shape {array.shape} of {array.dtype}. They must be rows (user, item) of whole "
            "numbers from 0 up, each a pair that was taken."
        )
    return torch.from_numpy(array.astype("int64").T.copy())
