"""Settings of MMRec (github.com/enoche/MMRec): what a whole `overall.yaml` says to mmgcn, and what it does not."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, cast

from floatline.errors import TargetError

# A file with one of these keys is MMRec's.
_MARKS = ("train_batch_size", "inter_splitting_label", "USER_ID_FIELD", "stopping_step")
_RENAMED = {
    "train_batch_size": "batch_size",
    "embedding_size": "dim_id",
    "n_layers": "num_layers",
    "inter_file_name": "interaction_file",
}
_FEATURES = {"vision_feature_file": "visual", "text_feature_file": "textual", "audio_feature_file": "acoustic"}
# Keys that change what is trained, and the values that mmgcn has.
_ONLY: dict[str, tuple[object, ...]] = {
    "learner": ("adam", "adamw"),
    "inter_splitting_label": ("x_label",),
    "field_separator": ("\t", ","),
    "training_neg_sample_num": (1,),
    "reg_weight": (0,),
    "use_neg_sampling": (True,),
    "use_full_sampling": (False,),
    "use_raw_features": (False,),
    "end2end": (False,),
    "is_multimodal_model": (True,),
    "req_training": (True,),
    "use_candidate_sampling": (False,),
    "filter_out_cod_start_users": (True,),
}


def translate(settings: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings of mmgcn, and the keys that were left out; a file that is not MMRec's comes back as it is.

    Args:
        settings: As the file has them.
        known: mmgcn's own keys. What is spelt nearly as one of them is kept: it is refused later, as a slip should be.

    Raises:
        TargetError: A value that mmgcn does not have and that would change what is trained.
    """
    if not any(mark in settings for mark in _MARKS):
        return dict(settings), []
    found: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in settings.items():
        if key in _ONLY:
            _check(key, value, _ONLY[key])
        elif key in _FEATURES:
            found.setdefault("feature_files", {})[_FEATURES[key]] = value
        elif key == "valid_metric":
            found["top_k"] = _read_place(value)
        elif key == "learning_rate_scheduler":
            _check(f"the first of {key}", next(iter(_as_list(value)), value), (1.0,))
        elif key == "topk":  # near to top_k, and several: valid_metric says which one counts
            ignored.append(key)
        elif key in _RENAMED or key in known or difflib.get_close_matches(key, known, n=1, cutoff=0.85):
            found[_RENAMED.get(key, key)] = _take_one(key, value)
        else:
            ignored.append(key)
    return found, ignored


def _check(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        shown = " or ".join(repr(each) for each in allowed)
        raise TargetError(f"{key} is {value!r}, and mmgcn has {shown} alone. Change it, or train with MMRec.")


def _read_place(value: object) -> int:
    """The K of Recall@K."""
    place = str(value).rpartition("@")[2]
    if not place.isdecimal():
        raise TargetError(f"valid_metric is {value!r}. Write such as Recall@20.")
    return int(place)


def _take_one(key: str, value: object) -> object:
    """The value; MMRec takes a list of numbers for a search."""
    several = _as_list(value)
    if len(several) > 1:
        raise TargetError(f"{key} is {several}, which MMRec searches through. Give one value.")
    return next(iter(several), value)


def _as_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []
