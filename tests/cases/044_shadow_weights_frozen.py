"""Teacher = EMA of the student, kept in half.

Symptom:   the student trains, but validation with the EMA weights hardly improves: most EMA entries never leave their
           initial value.
Truth:     ema += (1 - 0.9995) * (w - ema) in FP16: the increment is smaller than half a spacing of ema, so it rounds
           away.
Right fix: keep the EMA copy in FP32.
Wrong fix: "EMA needs more steps"; lower the decay until it moves (then it is not an average any more).
Source:    d8ahazard/sd_dreambooth_extension#1415, konpatp/diffae#16
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS = 1.5, True


def _loop(steps, fp32, probe, ema_dt):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(44)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.5 * p.sign())
    opt = torch.optim.SGD(model.parameters(), 5e-2)
    if probe:
        probe(model=model, optimizer=opt, scaler=None)
    ema = [p.detach().clone().to(torch.float32 if fp32 else ema_dt) for p in model.parameters()]
    x = torch.randn(48, 6, generator=g)
    y = x[:, :3].argmax(-1)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema, model.parameters(), strict=True):
                e.add_(p.to(e.dtype) - e, alpha=1 - 0.9995)
        losses.append(float(loss.detach()))
    with torch.no_grad():
        for e, p in zip(ema, model.parameters(), strict=True):
            p.copy_(e)
        metric = float(F.cross_entropy(model(x), y))
    return dict(losses=losses, model=model, metric=metric)


def train(steps=2500, fp32=False, probe=None):
    return _loop(steps, fp32, probe, torch.float16)


def fixed(steps=2500, fp32=False, probe=None):
    return _loop(steps, fp32, probe, torch.float32)


EXPECT = dict(
    cause="accumulator-stagnation",
    where="train|044_shadow_weights_frozen.py:42",
    code="e.add_(p.to(e.dtype) - e, alpha=1 - 0.9995)",
    op="aten.add_",
    fix="keep the EMA weights in FP32",
)
