"""Mask constants that the format cannot hold: the smallest number that it can, where a softmax makes both 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from floatline.precision.rewrites.calls import MISSED, NARROW, Call, Missed, name_set
from floatline.precision.rewrites.elementwise import CASTS, MOVES
from floatline.precision.rewrites.provenance import Origin, Origins

_FILLS = name_set("masked_fill masked_fill_ where __setitem__")
# What takes a softmax's input, or only asks for its shape.
_HARMLESS = name_set("softmax __get__ size dim ndimension numel stride __len__ is_floating_point is_contiguous")


def fitting_constant(call: Call, origins: Origins) -> Any | Missed:
    """softmax(masked_fill(x, mask, c)) is the same for every c far below the row's maximum: here the format's minimum.

    Numerics:
        A masked element's weight is exp(c - max) / sum, which FP32 rounds to 0 where c < max - 104, and a row that is
        masked altogether is uniform for every finite c. So the result has the same bits with c = -65504 in the place
        of c = -1e9, while the maximum of a row's unmasked scores is above -65,400; FP16 scores end at -65,504. Only
        constants that FP32 holds and the format does not are replaced; `masked_fill` with one raises in FP16, and
        other fills make it -inf, and a row of them NaN. What is not consumed by a softmax alone gets what the code
        asked for. Checked by tests/precision/rewrites/test_masks.py.
    """
    beyond = _constant_beyond(call)
    if beyond is None:
        return MISSED
    x, least = beyond
    before = origins.find(x, "filled")  # two masks, one after the other
    result = call.function(*call.args[:2], least, **call.kwargs)
    made = x if call.name == "__setitem__" else result
    others = [value for value in call.args if isinstance(value, Tensor) and value is not made]
    origins.note(made, "filled", made, watch=others, call=call, x=x, before=before)
    return result


def restore_unless_softmax(call: Call, origins: Origins) -> Call:
    """The call with the code's own constants instead of the replaced ones, unless a softmax takes them."""
    if call.name in _HARMLESS or call.name in MOVES or call.name in CASTS or _is_next_mask(call):
        return call

    def restore(value: Any) -> Any:
        found = origins.find(value, "filled")
        return value if found is None else restored(value, found)

    args = tuple(restore(value) for value in call.args)
    return Call(call.name, call.function, args, {name: restore(value) for name, value in call.kwargs.items()})


def restored(made: Tensor, origin: Origin) -> Tensor:
    """A filled tensor with the constant of the user's code; raises what that raises."""
    fill: Call = origin.options["call"]
    x: Tensor = origin.options["x"]
    before: Origin | None = origin.options["before"]
    first = x if before is None else restored(x, before)
    if fill.name in ("masked_fill_", "__setitem__"):
        fill.run()  # the same elements once more; nobody has written to them since
        return origin.move(x).to(made.dtype)
    args = tuple(first if value is x else value for value in fill.args)
    return origin.move(fill.function(*args, **fill.kwargs)).to(made.dtype)


def _is_next_mask(call: Call) -> bool:
    return _constant_beyond(call) is not None


def _constant_beyond(call: Call) -> tuple[Tensor, float] | None:
    """What a call fills, and the smallest number of its format, where the constant is beyond that."""
    if call.name not in _FILLS or len(call.args) != 3:
        return None
    x, constant = (call.args[1] if call.name == "where" else call.first), call.args[2]
    if not isinstance(x, Tensor) or x.dtype not in NARROW or not isinstance(constant, (int, float)):
        return None
    least = torch.finfo(x.dtype).min
    return (x, least) if torch.finfo(torch.float32).min <= constant < least else None
