"""Gradient accumulation with unscale_() and update() inside the micro-batch loop.

Symptom:   no error, no NaN; with AMP + accumulation only the last micro-batch seems to matter, FP32 trains on all of
           them.
Truth:     unscale_() divides everything accumulated so far by the scale, once per micro-batch: earlier contributions
           are divided by 65536 again and again. The update() in the loop resets the bookkeeping that would have raised.
Right fix: accumulate scaled gradients, then unscale_/clip/step/update once per optimizer step.
Wrong fix: shuffle the data (hides which samples are lost); raise LR; drop accumulation.
Source:    fastai/fastai#3069, microsoft/Swin-Transformer#311 (accumulation + unscale_)
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.01, True


def _loop(steps, fp32, probe, right):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    w = torch.tensor([[1.0, -1.0, 0.5, 2.0]])
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        total = 0.0
        for m in range(4):  # micro-batch m only holds feature m, as in a sorted data set
            x = torch.zeros(4, 4)
            x[:, m] = torch.tensor([1.0, -1.0, 0.5, -0.5])
            with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
                out = model(x)
            loss = (out.float() - x @ w.T).pow(2).mean()
            scaler.scale(loss / 4).backward()
            total += float(loss.detach()) / 4
            if not right:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.update()
        if right:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        losses.append(total)
    return dict(losses=losses, model=model)


def train(steps=20, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=20, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="scaler-misuse",
    where="train|059_unscale_every_microbatch.py:42",
    code="scaler.unscale_(opt)",
    op="torch.amp.GradScaler.unscale_",
    fix="unscale_ once, after the last micro-batch",
)
