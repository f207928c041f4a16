"""What is noted of every call: which function of which tensor its result is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from floatline.precision.rewrites.calls import Call, name_set, tensors_in
from floatline.precision.rewrites.provenance import Origins

# They move or copy elements and compute nothing: f(move(x)) is move(f(x)) for every elementwise f.
MOVES = name_set(
    """reshape view flatten unflatten ravel squeeze unsqueeze transpose swapaxes permute movedim t contiguous clone
    select narrow gather index_select take_along_dim masked_select __getitem__ expand expand_as view_as reshape_as
    flip roll"""
)
CASTS = name_set("float half bfloat16 double to type type_as")


def note_call(call: Call, result: Any, origins: Origins) -> None:
    """Remember what the result of a call is a function of, where a rule may want to know."""
    if not isinstance(result, Tensor) or call.kwargs.get("out") is not None:
        return
    first = call.first
    if call.name in MOVES or call.name in CASTS:
        _note_move(call, result, origins)
    elif call.name in ("sigmoid", "exp") and isinstance(first, Tensor):
        origins.note(result, call.name, first)
    elif call.name == "softmax" and isinstance(first, Tensor) and isinstance(call.get(1, "dim"), int):
        origins.note(result, "softmax", first, dim=call.get(1, "dim"))
    elif call.name == "neg" and (found := origins.find(first, "sigmoid")):
        origins.note_as(result, found, "minus-sigmoid")
    elif call.name in ("rsub", "sub", "add"):
        _note_sum(call, result, origins)
    elif call.name == "sum" and call.get(2, "keepdim") is True and isinstance(call.get(1, "dim"), int):
        found = origins.find(first, "exp")
        if found is not None and not found.moves:
            origins.note(result, "sum-of-exp", found.source, dim=call.get(1, "dim"))


def _note_move(call: Call, result: Tensor, origins: Origins) -> None:
    found = origins.find(call.first, "sigmoid", "one-minus-sigmoid", "minus-sigmoid", "softmax", "exp", "one-plus-exp",
                         "sum-of-exp", "filled", "wide")  # fmt: skip
    if found is None or result.device != call.first.device:
        return
    if call.name in CASTS:
        origins.note_as(result, found, found.kind)  # exact arithmetic knows no dtypes
        return
    rest = call.args[1:] if call.args else ()
    kwargs = {name: value for name, value in call.kwargs.items() if name != "input"}
    origins.note_moved(result, found, lambda t: call.function(t, *rest, **kwargs), watch=tensors_in(rest, kwargs))


def _note_sum(call: Call, result: Tensor, origins: Origins) -> None:
    if call.kwargs or len(call.args) != 2:
        return
    left, right = call.args
    if call.name == "rsub":
        left, right = right, left
    if call.name == "add":
        tensor, number = (right, left) if isinstance(right, Tensor) else (left, right)
        if _is_one(number) and (found := origins.find(tensor, "exp")):
            origins.note_as(result, found, "one-plus-exp")
    elif _is_one(left) and (found := origins.find(right, "sigmoid")):
        origins.note_as(result, found, "one-minus-sigmoid")


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1
