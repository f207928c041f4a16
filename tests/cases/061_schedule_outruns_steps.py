"""Short decay schedule that keeps counting while the scaler skips.

Symptom:   "lr_scheduler.step() before optimizer.step()" warning, then a flat loss: by the first real update the LR is
           ~0.
Truth:     the first ~20 steps are skipped while the scale falls to what this model needs; scheduler.step() is called
           anyway and burns the whole decay (or the warm-up).
Right fix: step the scheduler only when the optimizer stepped (scale did not drop), and start from a lower init_scale.
Wrong fix: silence the warning; raise the base LR; swap the order of the calls.
Source:    pytorch/pytorch#44511, pytorch/pytorch#55585, Lightning-AI/pytorch-lightning#16228
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.6, True


def _loop(steps, fp32, probe, guard):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(61)
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
    opt = torch.optim.Adam(model.parameters(), 5e-2)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=18)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler, scheduler=sched)
    x = torch.randn(24, 4, generator=g)
    y = x[:, :1].abs() - x[:, 1:2]
    losses, skipped = [], 0
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            out = model(x)
        err = (out.float() - y).pow(2).mean()
        before = scaler.get_scale()
        scaler.scale(err * 100).backward()
        scaler.step(opt)
        scaler.update()
        bad = scaler.get_scale() < before
        skipped += bad
        if not (guard and bad):
            sched.step()
        losses.append(float(err.detach()))
    return dict(losses=losses, model=model, skipped=skipped, scale=scaler.get_scale())


def train(steps=45, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=45, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="scheduler-vs-skipped-step",
    where="train|061_schedule_outruns_steps.py:44",
    code="sched.step()",
    op="torch.optim.lr_scheduler.LRScheduler.step",
    fix="call scheduler.step() only after a step that was not skipped",
)
