"""Training resumed many times from checkpoints that lack the scaler state.

Symptom:   every resume starts with a burst of skipped steps and (with short pre-emptible sessions) the run makes no
           progress at all; one long session trains fine.
Truth:     the checkpoint holds model and optimizer but not scaler.state_dict(): each session restarts at 65536 while
           this model needs <= 64, and all ten back-off steps are paid again.
Right fix: save and load scaler.state_dict().
Wrong fix: blame data order / optimizer state; lower LR after resume.
Source:    huggingface/transformers#34053, ultralytics/ultralytics#22189, facebookresearch/co-tracker#101
CUDA:      same.
"""

import copy

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.3, True


def _new():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def _loop(steps, fp32, probe, keep):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(60)
    x = torch.randn(16, 3, generator=g)
    y = x[:, :1] * x[:, 1:2]
    ckpt, losses, skipped, session = None, [], 0, 9
    while len(losses) < steps:
        model = _new()
        opt = torch.optim.Adam(model.parameters(), 2e-2)
        scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
        if ckpt:
            model.load_state_dict(ckpt["model"])
            opt.load_state_dict(ckpt["opt"])
            if keep:
                scaler.load_state_dict(ckpt["scaler"])
        if probe:
            probe(model=model, optimizer=opt, scaler=scaler)
        for _ in range(session):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
                out = model(x)
            err = (out.float() - y).pow(2).mean()
            loss = err * 3e4  # sum over a large simulation grid
            before = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            skipped += scaler.get_scale() < before
            losses.append(float(err.detach()))
        ckpt = copy.deepcopy(
            dict(model=model.state_dict(), opt=opt.state_dict(), scaler=scaler.state_dict() if keep else None)
        )
    return dict(losses=losses, model=model, skipped=skipped, scale=scaler.get_scale())


def train(steps=180, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=180, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="scaler-state-lost",
    where="train|060_preempted_sessions.py:55",
    code="ckpt = copy.deepcopy(",
    op="torch.amp.GradScaler.state_dict",
    fix="checkpoint scaler.state_dict()",
)
