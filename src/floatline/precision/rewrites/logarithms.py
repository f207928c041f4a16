"""Logarithms of probabilities, and ratios of exponentials: computed without the numbers that 16 bits cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from floatline.precision.rewrites.calls import MISSED, Call, Missed, result_dtype, widen, without_autocast
from floatline.precision.rewrites.provenance import Origin, Origins, is_bare


def log_of_sigmoid(call: Call, origins: Origins) -> Tensor | Missed:
    """log(sigmoid(x)) = logsigmoid(x), and log(1 - sigmoid(x)) = log1p(-sigmoid(x)) = logsigmoid(-x), for every x.

    Numerics:
        1 - sigmoid(x) = sigmoid(-x), so both are the same function in exact arithmetic. In FP16 sigmoid(x) is 0 below
        -17.3 and 1 above 8.3, and its logarithm -inf. logsigmoid is computed in FP32 and rounded once.
        log(sigmoid(x) + eps) and log(clamp(sigmoid(x))) are other functions and are left alone.
        Checked over all FP16 numbers by
        tests/precision/rewrites/test_identities.py.
    """
    if call.name == "log" and (found := _find(call, origins, "sigmoid")):
        return _answer(call, found, F.logsigmoid)
    if call.name == "log" and (found := _find(call, origins, "one-minus-sigmoid")):
        return _answer(call, found, _log_of_complement)
    if call.name == "log1p" and (found := _find(call, origins, "minus-sigmoid")):
        return _answer(call, found, _log_of_complement)
    return MISSED


def log_of_softmax(call: Call, origins: Origins) -> Tensor | Missed:
    """log(softmax(x)) = log_softmax(x), for every row with a finite maximum.

    Numerics:
        The same function in exact arithmetic, also when elements were picked or moved in between (gather, index).
        In FP16 probabilities below 2.98e-8 are 0, and their logarithm -inf. Computed in FP32 and rounded once.
        Checked by tests/precision/rewrites/test_identities.py.
    """
    if call.name == "log" and (found := _find(call, origins, "softmax")):
        return _answer(call, found, partial(torch.log_softmax, dim=found.options["dim"]))
    return MISSED


def log_of_one_plus_exp(call: Call, origins: Origins) -> Tensor | Missed:
    """log(1 + exp(x)) = log1p(exp(x)) = softplus(x) = -logsigmoid(-x), for every x.

    Numerics:
        The same function in exact arithmetic. In FP16 exp(x) is inf above 11.09. Computed as -logsigmoid(-x), because
        torch's softplus is x above its threshold of 20. Checked over all FP16 numbers by
        tests/precision/rewrites/test_identities.py.
    """
    if call.name == "log" and (found := _find(call, origins, "one-plus-exp")):
        return _answer(call, found, _softplus)
    if call.name == "log1p" and (found := _find(call, origins, "exp")):
        return _answer(call, found, _softplus)
    return MISSED


def ratio_of_exp(call: Call, origins: Origins) -> Tensor | Missed:
    """exp(x) / sum(exp(x)) = softmax(x), and exp(x) / (1 + exp(x)) = 1 / (1 + exp(-x)) = sigmoid(x).

    Numerics:
        The same functions in exact arithmetic, for every x. In FP16 exp(x) is inf above 11.09, and inf / inf NaN.
        Computed in FP32 and rounded once. A ratio of two different tensors, or a sum without `keepdim`, is left
        alone. Checked by tests/precision/rewrites/test_identities.py.
    """
    if call.kwargs or call.name not in ("div", "rdiv", "reciprocal"):
        return MISSED
    above, below = _fraction(call)
    under = origins.find(below, "sum-of-exp", "one-plus-exp")
    if under is None or under.moves or not is_bare(below):
        return MISSED
    if isinstance(above, (int, float)) and above == 1 and under.kind == "one-plus-exp":
        return _answer(call, under, _complement, like=below)
    over = origins.find(above, "exp")
    if over is None or over.moves or over.source is not under.source:
        return MISSED
    above = cast("Tensor", above)
    if not is_bare(above):
        return MISSED
    if under.kind == "sum-of-exp":
        dim: int = under.options["dim"]
        result = _answer(call, over, partial(torch.softmax, dim=dim), like=above)
        origins.note(result, "softmax", over.source, dim=dim)
        return result
    result = _answer(call, over, torch.sigmoid, like=above)
    origins.note(result, "sigmoid", over.source)
    return result


def cross_entropy_of_sigmoid(call: Call, origins: Origins) -> Tensor | Missed:
    """binary_cross_entropy(sigmoid(x), t) from x itself: t·min(softplus(-x), 100) + (1 - t)·min(softplus(x), 100).

    Numerics:
        torch's binary_cross_entropy is -t·max(log p, -100) - (1 - t)·max(log(1 - p), -100); with p = sigmoid(x) it
        is the formula above in exact arithmetic, for every x, the bound of 100 included; up to |x| of 100 that is
        binary_cross_entropy_with_logits. Computed in FP32; a mean or sum stays FP32. It is also what autocast asks
        for, which refuses binary_cross_entropy. Checked over all FP16 numbers by
        tests/precision/rewrites/test_identities.py.
    """
    if call.name != "binary_cross_entropy":
        return MISSED
    found, target = _find(call, origins, "sigmoid"), call.get(1, "target")
    legacy = call.kwargs.get("size_average") is not None or call.kwargs.get("reduce") is not None
    if found is None or legacy or not isinstance(target, Tensor) or target.shape != call.first.shape:
        return MISSED
    weight, reduction = call.kwargs.get("weight"), call.kwargs.get("reduction", "mean")
    if reduction not in ("mean", "sum", "none"):
        return MISSED
    with without_autocast(target):
        x, t = found.move(widen(_source(call.first, found))), widen(target)
        losses = t * (-F.logsigmoid(x)).clamp(max=100.0) + (1 - t) * (-F.logsigmoid(-x)).clamp(max=100.0)
        losses = losses if weight is None else losses * widen(weight)
        if reduction == "none":
            return losses.to(call.first.dtype)
        return losses.mean() if reduction == "mean" else losses.sum()


def _find(call: Call, origins: Origins, kind: str) -> Origin | None:
    """Where the argument came from, if leaving it out of the graph is not seen by anyone."""
    if call.kwargs.get("out") is not None:
        return None
    found = origins.find(call.first, kind)
    return found if found is not None and is_bare(call.first) else None


def _source(made: Tensor, origin: Origin) -> Tensor:
    """What a tensor was made from, with no more gradient than the tensor had."""
    return origin.source if made.requires_grad else origin.source.detach()


def _answer(call: Call, origin: Origin, compute: Callable[[Tensor], Tensor], *, like: Tensor | None = None) -> Tensor:
    made = call.first if like is None else like
    with without_autocast(made):
        result = origin.move(compute(widen(_source(made, origin))))
    return result.to(result_dtype(call))


def _fraction(call: Call) -> tuple[Any, Any]:
    if call.name == "reciprocal":
        return 1, call.first
    if len(call.args) != 2:
        return None, None
    return call.args if call.name == "div" else (call.args[1], call.args[0])


def _log_of_complement(x: Tensor) -> Tensor:
    return F.logsigmoid(-x)


def _complement(x: Tensor) -> Tensor:
    return torch.sigmoid(-x)


def _softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)
