"""Small models and scripted gradients for the scaler's tests."""

import torch
from torch import nn


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (5, 3)]


def backward(scaler, params, step, *, bad=None, size=1.0):
    """A loss whose gradients are the same for every scaler; `bad` is planted into the first one."""
    loss = torch.zeros(())
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * step + i)
        loss = loss + (param.float() * torch.randn(param.shape, generator=generator)).sum() * size
    scaler.scale(loss).backward()
    if bad is not None:
        params[0].grad[0] = bad


def run(scaler, optimizer, params, script, *, clip=None):
    """One step for each entry of the script: None, or the number that is planted. Scales and trackers after each."""
    history = []
    for step, bad in enumerate(script):
        optimizer.zero_grad()
        backward(scaler, params, step, bad=bad)
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return history
