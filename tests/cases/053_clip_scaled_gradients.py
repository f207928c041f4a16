"""AMP loop that clips before unscaling.

Symptom:   no NaN, no skipped steps, but the loss creeps: AMP is ~1000x slower than FP32 at the same LR.
Truth:     clip_grad_norm_ sees gradients multiplied by 65536 and clips them to 1.0; after unscaling the norm is 1.5e-5.
Right fix: scaler.unscale_(optimizer) before clip_grad_norm_.
Wrong fix: raise LR (diverges as soon as the scale drops); remove clipping; lower init_scale.
Source:    Lightning-AI/pytorch-lightning#9599, milesial/Pytorch-UNet#468, pytorch/examples#1196
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS = 0.5, True


def _loop(steps, fp32, probe, unscale):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(53)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 3))
    opt = torch.optim.SGD(model.parameters(), 0.3)
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    proto = torch.randn(3, 1, 6, 6, generator=g)
    losses = []
    for _ in range(steps):
        y = torch.randint(0, 3, (12,), generator=g)
        x = proto[y] + 0.4 * torch.randn(12, 1, 6, 6, generator=g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=model, metric=sum(losses[-5:]) / 5)


def train(steps=40, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=40, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="clip-before-unscale",
    where="train|053_clip_scaled_gradients.py:38",
    code="nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    op="torch.nn.utils.clip_grad_norm_",
    fix="scaler.unscale_(optimizer) before clipping",
)
