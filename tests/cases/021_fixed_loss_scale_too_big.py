"""Hand-made static loss scaling with a far too large constant.

Symptom:   loss does not move by a single digit; the log says "non-finite grad, step skipped" every iteration.
Truth:     the constant scale (2**22) pushes the half gradients of the early layers past 65504: every step overflows,
           and a static scale never backs off. Forward values are small.
Right fix: dynamic GradScaler, or a much smaller constant.
Wrong fix: clip the gradients (clipping inf gives NaN); lower LR; remove the isfinite check (weights become NaN).
Source:    open-mmlab/mmcv#585 (static -> dynamic scale), open-mmlab/mmocr#1375 (loss_scale=512. config)
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS = 0.2, True


def _loop(steps, fp32, probe, scale, dynamic):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(21)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=dynamic and not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    x = torch.randn(16, 6, generator=g)
    y = torch.sin(x[:, :1]) * 3
    losses, skipped = [], 0
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            loss = F.mse_loss(model(x), y)
        losses.append(float(loss.detach()))
        if dynamic or fp32:
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            continue
        (loss * scale).backward()
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            skipped += 1
            continue
        for p in model.parameters():
            p.grad.div_(scale)
        opt.step()
    return dict(losses=losses, model=model, skipped=skipped, scale=scale)


def train(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, 2.0**22, False)


def fixed(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, 1.0, True)


EXPECT = dict(
    cause="gradient-overflow",
    where="train|021_fixed_loss_scale_too_big.py:41",
    code="(loss * scale).backward()",
    op="backward",
    fix="use a dynamic GradScaler instead of the constant 2**22",
)
