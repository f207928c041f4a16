"""Steps on 16-bit weights with remainders in one pass over memory, compiled by numba for a format when first used."""

import numba
import numpy as np
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


def make_adamw(widen, join, split):
    """AdamW's loop for a format."""

    @numba.njit(nogil=True, error_model="numpy")
    def step(weight, remainder, grads, exp_avg, exp_avg_sq, factor, decay, lead, beta2, rest2, correction, eps, size):
        for i in range(weight.size):
            grad = f32(widen(grads[i]) * factor)
            master = f32(join(weight[i], remainder[i]) * decay)
            mean = exp_avg[i]
            mean = fused_multiply_add(lead, f32(grad - mean), mean)  # lerp_
            square = fused_multiply_add(f32(rest2 * grad), grad, f32(exp_avg_sq[i] * beta2))  # addcmul_
            exp_avg[i], exp_avg_sq[i] = mean, square
            denominator = f32(f32(f32(np.sqrt(square)) / correction) + eps)
            master = f32(master + f32(f32(size * mean) / denominator))
            weight[i], remainder[i] = split(master)

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

    @numba.njit(nogil=True, error_model="numpy")
    def step(weight, remainder, grads, buffer, factor, decay, size, first, momentum, keep, ahead):
        for i in range(weight.size):
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

    return step


_FORMATS = {
    "torch.float16": (widen_half, join_half, split_half),
    "torch.bfloat16": (widen_brain, join_brain, split_brain),
}
_MAKERS = {"adamw": make_adamw, "sgd": make_sgd, "momentum": make_momentum}
STEPS = {(name, dtype): make(*parts) for name, make in _MAKERS.items() for dtype, parts in _FORMATS.items()}
