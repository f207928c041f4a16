"""HEALTHY: conv net whose first few steps are skipped while the scale settles.

Symptom:   none - 4 to 8 "gradient overflow, skipping step" messages at the start, then normal training.
Truth:     this is how dynamic loss scaling works. A tool must stay silent (or at most inform).
Right fix: none needed.
Wrong fix: lower init_scale "to get rid of the warnings", disable the scaler.
Source:    NVIDIA/apex#592 (mcarilli: normal for the first iterations), LEEYOONHYUNG/BVAE-TTS#3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS = 0.3, True


def train(steps=50, fp32=False, probe=None):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(86)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    proto = torch.randn(3, 1, 6, 6, generator=g)
    losses, skipped = [], 0
    for _ in range(steps):
        y = torch.randint(0, 3, (12,), generator=g)
        x = proto[y] + 0.4 * torch.randn(12, 1, 6, 6, generator=g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            loss = F.cross_entropy(model(x), y)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=model, metric=sum(losses[-5:]) / 5, skipped=skipped, scale=scaler.get_scale())


def fixed(steps=50, fp32=False, probe=None):
    return train(steps, fp32, probe)


EXPECT = dict(
    cause="healthy",
    where="",
    op="",
    fix="none needed",
)
