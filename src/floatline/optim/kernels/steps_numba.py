"""Steps on 16-bit weights with remainders in one pass over memory, compiled by numba for a format when first used."""

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from floatline.numerics.split_numba import (
    as_float,
    f32,
    i32,
    join_brain,
    join_half,
    split_brain,
    split_half,
    widen_half,
)

_IN_CACHE = 1 << 15  # elements of which torch makes no shares for threads of its own


@intrinsic
def fused_multiply_add(context, x, y, z):
    """x·y + z, rounded once."""
    del context, x, y, z
    real = types.float32
    return real(real, real, real), lambda _, b, __, args: b.fma(*args)


@numba.njit(inline="always")
def widen_brain(brain):
    """The float32 of a bfloat16's bits."""
    return as_float(i32(i32(brain) << i32(16)))


# The loops: torch's operations in their order, each rounded as torch's vector code rounds it.


@numba.njit(inline="always")
def follow(grad, mean, square, lead, beta2, rest2):
    """Adam's two moments after a gradient."""
    mean = fused_multiply_add(lead, f32(grad - mean), mean)  # lerp_
    return mean, fused_multiply_add(f32(rest2 * grad), grad, f32(square * beta2))  # addcmul_


@numba.njit(inline="always")
def move(master, mean, root, decay, correction, eps, size):
    """A weight after Adam's step; `root` is that of the second moment."""
    denominator = f32(f32(root / correction) + eps)
    return f32(f32(master * decay) + f32(f32(size * mean) / denominator))  # addcdiv_


def make_adamw(widen, join, split):
    """AdamW's loop for a format."""

    @numba.njit(nogil=True, error_model="numpy")
    def step(weight, remainder, grads, exp_avg, exp_avg_sq, factor, decay, lead, beta2, rest2, correction, eps, size):
        for i in range(weight.size):
            mean, square = follow(f32(widen(grads[i]) * factor), exp_avg[i], exp_avg_sq[i], lead, beta2, rest2)
            exp_avg[i], exp_avg_sq[i] = mean, square
            master = join(weight[i], remainder[i])
            weight[i], remainder[i] = split(move(master, mean, f32(np.sqrt(square)), decay, correction, eps, size))

    return step


def make_adamw_with_roots(widen, join, split):
    """AdamW's loop where torch's roots are not the nearest numbers, as those of Intel's MKL: torch computes them."""

    @numba.njit(nogil=True, error_model="numpy")
    def follow_all(grads, exp_avg, exp_avg_sq, factor, lead, beta2, rest2):
        for i in range(grads.size):
            grad = f32(widen(grads[i]) * factor)
            exp_avg[i], exp_avg_sq[i] = follow(grad, exp_avg[i], exp_avg_sq[i], lead, beta2, rest2)

    @numba.njit(nogil=True, error_model="numpy")
    def move_all(weight, remainder, exp_avg, roots, decay, correction, eps, size):
        for i in range(weight.size):
            master = join(weight[i], remainder[i])
            weight[i], remainder[i] = split(move(master, exp_avg[i], roots[i], decay, correction, eps, size))

    def step(weight, remainder, grads, exp_avg, exp_avg_sq, factor, decay, lead, beta2, rest2, correction, eps, size):
        roots = torch.empty(min(weight.size, _IN_CACHE), device="cpu")
        for start in range(0, weight.size, _IN_CACHE):
            cut = slice(start, start + _IN_CACHE)
            squares = exp_avg_sq[cut]
            follow_all(grads[cut], exp_avg[cut], squares, factor, lead, beta2, rest2)
            found = torch.sqrt(torch.from_numpy(squares), out=roots[: squares.size]).numpy()
            move_all(weight[cut], remainder[cut], exp_avg[cut], found, decay, correction, eps, size)

    return step


def make_sgd(widen, join, split):
    """SGD's loop without momentum for a format."""

    @numba.njit(nogil=True, error_model="numpy")
    def step(weight, remainder, grads, factor, decay, size):
        for i in range(weight.size):
            grad = f32(widen(grads[i]) * factor)
            master = join(weight[i], remainder[i])
            if decay != 0:
                grad = fused_multiply_add(decay, master, grad)
            weight[i], remainder[i] = split(fused_multiply_add(size, grad, master))

    return step


def make_momentum(widen, join, split):
    """SGD's loop with momentum for a format."""

    @numba.njit(inline="always")
    def advance(i, weight, remainder, grads, buffer, factor, decay, size, first, momentum, keep, ahead):
        grad = f32(widen(grads[i]) * factor)
        master = join(weight[i], remainder[i])
        # Both are computed and one is chosen: branches would keep the processor's vectors out.
        decayed = fused_multiply_add(decay, master, grad)
        grad = decayed if decay != 0 else grad
        moving = fused_multiply_add(keep, grad, f32(buffer[i] * momentum))
        moving = grad if first != 0 else moving
        buffer[i] = moving
        looking = fused_multiply_add(ahead, moving, grad)
        moving = looking if ahead != 0 else moving
        weight[i], remainder[i] = split(fused_multiply_add(size, moving, master))

    @numba.njit(nogil=True, error_model="numpy")
    def step(weight, remainder, grads, buffer, factor, decay, size, first, momentum, keep, ahead):
        none = f32(0)
        if decay == 0 and first == 0 and ahead == 0:
            for i in range(weight.size):  # The compiler sees that nothing is chosen.
                advance(i, weight, remainder, grads, buffer, factor, none, size, none, momentum, keep, none)
            return
        for i in range(weight.size):
            advance(i, weight, remainder, grads, buffer, factor, decay, size, first, momentum, keep, ahead)

    return step


_FORMATS = {
    "torch.float16": (widen_half, join_half, split_half),
    "torch.bfloat16": (widen_brain, join_brain, split_brain),
}
_MAKERS = {"adamw": (make_adamw, make_adamw_with_roots), "sgd": (make_sgd,), "momentum": (make_momentum,)}
# By name and format, each with what to try first.
STEPS = {
    (name, dtype): tuple(make(*parts) for make in makers)
    for name, makers in _MAKERS.items()
    for dtype, parts in _FORMATS.items()
}
