"""Small constants that FP16 rounds away: what they protect is computed in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from floatline.precision.rewrites.calls import (
    MISSED,
    NARROW,
    Call,
    Missed,
    name_set,
    result_dtype,
    widen,
    without_autocast,
)
from floatline.precision.rewrites.provenance import Origins

_ADDS = name_set("add add_ clamp clamp_ clamp_min clamp_min_")
_TAKERS = name_set("div rdiv mul sqrt rsqrt log reciprocal pow neg square")
# Functions with an eps of their own, and its place among the arguments.
_WITH_EPS = {
    "normalize": 3,
    "cosine_similarity": 3,
    "pairwise_distance": 3,
    "layer_norm": 4,
    "rms_norm": 3,
    "group_norm": 4,
}


def eps_in_fp32(call: Call, origins: Origins) -> Any | Missed:
    """x / (y + eps), rsqrt(y + eps), log(y + eps), x / clamp(y, min=eps): the same, with y + eps in FP32.

    Numerics:
        The same function in exact arithmetic: nothing is changed but the dtype, from the sum up to the last of the
        products, quotients, roots and logarithms that take it; each of their results is rounded once. FP16 rounds an
        eps below 2.98e-8 to 0, and 0 / 0 is NaN; below 6.1e-5 it has fewer than 11 bits. Functions with an eps of
        their own (normalize, cosine_similarity, layer_norm) are computed in FP32. An eps that the format holds is left
        alone. Checked by tests/precision/rewrites/test_small_eps.py.
    """
    if call.kwargs.get("out") is not None:
        return MISSED
    if call.name in _WITH_EPS:
        return _run_wide(call, origins) if _own_eps_is_lost(call) else MISSED
    if call.name in _ADDS and _constant_is_lost(call):
        return _begin(call, origins)
    if call.name in _TAKERS and any(origins.find(value, "wide") for value in call.args):
        return _run_wide(call, origins)
    return MISSED


def _begin(call: Call, origins: Origins) -> Tensor:
    tensor = next(value for value in call.args if isinstance(value, Tensor))
    with without_autocast(tensor):
        inner = tensor.clone() if call.name.endswith("_") else tensor
        wide = call.run_with(lambda value: widen(inner) if value is tensor else value)
    result = call.run()
    origins.note(result, "wide", wide)
    return result


def _run_wide(call: Call, origins: Origins) -> Any:
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]

    def exchange(value: Any) -> Any:
        found = origins.find(value, "wide")
        if found is None:
            return widen(value)
        return found.move(
            found.source if value.requires_grad or not found.source.requires_grad else found.source.detach()
        )

    with without_autocast(*tensors):
        wide = call.run_with(exchange)
    result = wide.to(result_dtype(call) if call.name in _TAKERS else tensors[0].dtype)
    origins.note(result, "wide", wide)
    return result


def _constant_is_lost(call: Call) -> bool:
    tensors = [value for value in call.args if isinstance(value, Tensor)]
    if len(tensors) != 1 or tensors[0].dtype not in NARROW or "alpha" in call.kwargs:
        return False
    numbers = [value for value in (*call.args, call.kwargs.get("min")) if isinstance(value, float)]
    return bool(numbers) and 0 < abs(numbers[0]) < torch.finfo(tensors[0].dtype).smallest_normal


def _own_eps_is_lost(call: Call) -> bool:
    eps, first = call.get(_WITH_EPS[call.name], "eps"), call.first
    if eps is None and call.name in ("cosine_similarity", "pairwise_distance"):
        eps = 1e-8 if call.name == "cosine_similarity" else 1e-6
    if not isinstance(first, Tensor) or first.dtype not in NARROW or not isinstance(eps, float):
        return False
    return 0 < eps < torch.finfo(first.dtype).smallest_normal
