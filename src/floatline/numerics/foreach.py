"""torch's operations on lists of tensors, which have private names; loops where a torch does not have them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def choose(name: str) -> Callable[..., Any]:
    """torch's own operation on lists, or the loop that stands in for it.

    Args:
        name: Of the operation on one tensor, such as 'add_'.
    """
    return getattr(torch, f"_foreach_{name}", None) or loop(name)


def loop(name: str) -> Callable[..., Any]:
    """The same operation, one tensor after the other.

    Numerics:
        In float32 every result has the bits of torch's. In 16 bits torch may round a Python number to the tensor's
        format first, and this does not. Checked by tests/numerics/test_foreach.py.

    Args:
        name: Of the operation on one tensor, such as 'add_'; 'norm' takes the order, and a dtype to add up in.
    """
    if name == "norm":
        return _norms

    def run(tensors: list[Tensor], *others: Any, **options: Any) -> list[Tensor] | None:
        made: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            own = [cast("Any", other)[i] if isinstance(other, list | tuple) else other for other in others]
            scalar = own.pop() if name in ("addcmul_", "addcdiv_") and len(own) == 3 else None
            extra = options if scalar is None else {**options, "value": scalar}
            made.append(getattr(tensor, name)(*own, **extra))
        return None if name.endswith("_") else made

    return run


def _norms(tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def check_and_unscale_by_loop(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients by a number, and set a flag to 1.0 where one of them is inf or NaN.

    Args:
        grads: Changed in place.
        found_inf: The flag; it stays 1.0 where it is.
        inverse: What they are multiplied by.
    """
    for grad in grads:
        found_inf.copy_(torch.where(grad.isfinite().all(), found_inf, 1.0))
        if float(inverse) != 1.0:  # as torch: the gradients stay, bit for bit
            grad.copy_((grad.float() * inverse).to(grad.dtype) if grad.element_size() < 4 else grad * inverse)


def _late(name: str) -> Callable[..., Any]:
    """Look the operation up in every call, so that a patched torch function is used too."""
    return lambda *args, **options: choose(name)(*args, **options)


add: Callable[..., list[Tensor]] = _late("add")
mul: Callable[..., list[Tensor]] = _late("mul")
neg: Callable[..., list[Tensor]] = _late("neg")
norm: Callable[..., list[Tensor]] = _late("norm")
sqrt: Callable[..., list[Tensor]] = _late("sqrt")
add_: Callable[..., None] = _late("add_")
addcdiv_: Callable[..., None] = _late("addcdiv_")
addcmul_: Callable[..., None] = _late("addcmul_")
copy_: Callable[..., None] = _late("copy_")
div_: Callable[..., None] = _late("div_")
lerp_: Callable[..., None] = _late("lerp_")
mul_: Callable[..., None] = _late("mul_")
sign_: Callable[..., None] = _late("sign_")


def check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """As `check_and_unscale_by_loop`, in one launch where torch has the operation."""
    own = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", check_and_unscale_by_loop)
    own(grads, found_inf, inverse)
