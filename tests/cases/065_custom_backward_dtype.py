"""Custom autograd.Function (fused linear + square) used under autocast without custom_fwd/custom_bwd.

Symptom:   forward works, loss.backward() raises "expected m1 and m2 to have the same dtype".
Truth:     inside forward autocast turns the matmul into half, but the saved weight is FP32; backward runs without
           autocast and multiplies a half gradient with an FP32 weight.
Right fix: decorate with torch.amp.custom_fwd/custom_bwd(device_type=...), so backward runs under the same autocast
           state.
Wrong fix: wrap loss.backward() in autocast; cast the weight parameter to half.
Source:    pytorch/pytorch#38487, pytorch/pytorch#47906
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.5, True, 40


class SquaredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        z = x @ w.t()
        ctx.save_for_backward(x, w, z)
        return z * z

    @staticmethod
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors
        gz = 2 * g * z
        return gz @ w, gz.t() @ x


class SquaredLinearAmp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        return SquaredLinear.forward(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w, z = ctx.saved_tensors
        gz = 2 * g * z
        return (gz @ w).to(x.dtype), (gz.t() @ x).to(w.dtype)


class QuadNet(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn, self.w, self.out = fn, nn.Parameter(torch.randn(8, 3) * 0.4), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.fn.apply(x, self.w))


def _make(fn):
    g = torch.Generator().manual_seed(65)
    batches = []
    for _ in range(2):
        x = torch.randn(24, 3, generator=g)
        batches.append(((x,), ((x.pow(2).sum(1) > 2.5).long(),)))
    return QuadNet(fn), batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 3e-2)


def build():
    return _make(SquaredLinear)


def fixed():
    return _make(SquaredLinearAmp)


EXPECT = dict(
    cause="dtype-mismatch",
    where="SquaredLinear.backward|065_custom_backward_dtype.py:31",
    code="return gz @ w, gz.t() @ x",
    op="aten.mm",
    fix="use torch.amp.custom_fwd / custom_bwd",
)
