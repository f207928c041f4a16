"""AMP loop that scales the loss but calls optimizer.step() itself.

Symptom:   loss explodes to NaN within two steps with SGD, only with AMP on.
Truth:     scaler.scale(loss).backward() leaves gradients multiplied by 65536; optimizer.step() uses them as they are -
           the effective LR is 65536x. scaler.step() (which unscales) is never called.
Right fix: scaler.step(optimizer); scaler.update().
Wrong fix: divide LR by 65536; switch to Adam (hides it, breaks eps and weight decay, no inf check).
Source:    IAHispano/Applio#860
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.2, True


def _loop(steps, fp32, probe, right):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(57)
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    x = torch.randn(32, 3, generator=g)
    y = x[:, :1] - x[:, 1:2]
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            out = model(x)
        loss = (out.float() - y).pow(2).mean()
        scaler.scale(loss).backward()
        if right:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=model)


def train(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=60, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="scaler-misuse",
    where="train|057_optimizer_step_directly.py:40",
    code="opt.step()",
    op="torch.optim.SGD.step",
    fix="scaler.step(optimizer); scaler.update()",
)
