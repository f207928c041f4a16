"""WGAN-GP critic: gradient penalty computed from scaled gradients.

Symptom:   only with AMP: critic loss NaN/huge at first, the scale drops by ~11 halvings, then the critic is flat (its
           gradient norm is pinned at 1/scale) and the Wasserstein estimate stays at 0. FP32 is normal.
Truth:     torch.autograd.grad is called on scaler.scale(out): the input gradients are 65536x too large and enter
           (||g|| - 1)^2 as if they were real, far beyond the FP16 range.
Right fix: divide the gradients by scaler.get_scale() before forming the penalty (or compute the penalty unscaled in
           FP32).
Wrong fix: lower the penalty weight; clip; smaller init_scale (still wrong by that factor).
Source:    NVIDIA/apex#654, NVIDIA/apex#215, tensorflow/tensorflow#48662
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = -0.3, True


def _loop(steps, fp32, probe, unscale):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(62)
    critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.Adam(critic.parameters(), 2e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=critic, optimizer=opt, scaler=scaler)
    losses, skipped = [], 0
    for _ in range(steps):
        real = torch.randn(16, 2, generator=g) * 0.3 + 1
        fake = torch.randn(16, 2, generator=g) * 0.3 - 1
        mid = (real + (fake - real) * torch.rand(16, 1, generator=g)).requires_grad_()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            w = critic(fake).mean() - critic(real).mean()
            out = critic(mid)
        grad = torch.autograd.grad(scaler.scale(out.sum()), mid, create_graph=True)[0]
        if unscale:
            grad = grad * (1.0 / scaler.get_scale())
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            pen = (grad.float().pow(2).sum(1) + 1e-6).sqrt().sub(1).pow(2).mean()
            loss = w.float() + 10 * pen
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=critic, metric=sum(losses[-5:]) / 5, skipped=skipped, scale=scaler.get_scale())


def train(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="scaled-grad-in-penalty",
    where="train|062_gradient_penalty_scaled.py:38",
    code="grad = torch.autograd.grad(scaler.scale(out.sum()), mid, create_graph=True)[0]",
    op="torch.autograd.grad",
    fix="multiply the gradients by 1/scaler.get_scale() before the penalty",
)
