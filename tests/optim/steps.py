"""What the tests of the optimizers share: parameters, gradients, and a snapshot of every bit."""

import torch
from torch import nn

from floatline.numerics.split import join_master

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
SHAPES = [(3,), (17, 33), (5, 1, 7), (0, 4), (), (1000,)]


def make_params(dtype, *, shapes=SHAPES, seed=0):
    """Weights between 0.05 and 1 in magnitude, so that small steps never lead them near zero."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        size = torch.rand(shape, generator=generator) * 0.95 + 0.05
        sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
        params.append(nn.Parameter((size * sign).to(dtype)))
    return params


def copies(params):
    """The same numbers as float32 parameters."""
    return [nn.Parameter(p.detach().float().clone()) for p in params]


def set_grads(params, *others, step=0, size=0.01):
    """The same gradients for each list, of each parameter's own dtype; the first list's rounding decides."""
    generator = torch.Generator().manual_seed(1000 + step)
    for row in zip(params, *others, strict=True):
        grad = (torch.randn(row[0].shape, generator=generator) * size).to(row[0].dtype)
        for param in row:
            param.grad = grad.to(param.dtype)


def masters(optimizer):
    """The float32 numbers that the weights stand for."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            weight = param.detach()
            if "remainder" in state:
                found.append(join_master(weight, state["remainder"]))
            else:
                extra = state.get("compensation", torch.zeros(()))
                found.append(weight.float() + extra.float())
    return found


def snapshot(optimizer):
    """Every bit of weights and states."""
    kept = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors = {"weight": param.detach(), **optimizer.state[param]}
            kept.append({name: tensor.clone() for name, tensor in tensors.items()})
    return kept


def same_bits(one, two):
    """Whether two snapshots agree in every bit; NaN agrees with itself."""
    if len(one) != len(two):
        return False
    for left, right in zip(one, two, strict=True):
        if left.keys() != right.keys():
            return False
        for name in left:
            a, b = left[name].contiguous(), right[name].contiguous()
            if a.dtype != b.dtype or a.shape != b.shape:
                return False
            if not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
                return False
    return True
