"""Super-resolution under FP16 autocast, but without GradScaler.

Symptom:   the loss falls in FP32 and with BF16; with FP16 autocast it is perfectly flat. No NaN anywhere.
Truth:     the loss is a mean over many pixels times a small weight, so activation gradients are ~1e-8 and flush to zero
           in half. No loss scaling is used.
Right fix: torch.amp.GradScaler (or BF16).
Wrong fix: raise the LR (0 * lr is 0); train longer; blame the architecture.
Source:    engichang1467/Open-Rig3R#35
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.7, True


def _loop(steps, fp32, probe, use_scaler):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(28)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=use_scaler and not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    hi = torch.rand(2, 1, 32, 32, generator=g).cumsum(2) % 2
    lo = nn.functional.avg_pool2d(hi, 2)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            out = model(lo)
        mse = (out.float() - hi).pow(2).mean()
        loss = 2e-6 * mse  # weight inherited from a multi-task recipe
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(float(mse.detach()))
    return dict(losses=losses, model=model)


def train(steps=40, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=40, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="gradient-underflow",
    where="train|028_autocast_without_scaler.py:36",
    code="scaler.scale(loss).backward()",
    op="backward",
    fix="scale the loss with GradScaler (or use BF16)",
)
