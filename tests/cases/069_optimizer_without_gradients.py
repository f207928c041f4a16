"""Two optimizers, one of which owns parameters that this loss never touches.

Symptom:   AssertionError: No inf checks were recorded for this optimizer.
Truth:     the proposal network's output is detached, so its parameters have grad None and scaler.step has nothing to
           check. Not a precision problem: in FP32 the same optimizer step is silently a no-op.
Right fix: step an optimizer only when its parameters received gradients.
Wrong fix: comment the assertion out; add 0 * proposal_loss with detached inputs (still None).
Source:    nerfstudio-project/nerfstudio#1919, SheldonTsui/GOF_NeurIPS2021#2
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS = 0.15, False


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.proposal, self.color = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, connect):
        w = self.proposal(x)
        if not connect:
            w = w.detach()  # importance weights are treated as constants
        return w, self.color(x)


def _loop(steps, fp32, probe, connect):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(69)
    model = Field()
    opts = [torch.optim.Adam(model.proposal.parameters(), 5e-2), torch.optim.Adam(model.color.parameters(), 5e-2)]
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opts[0], scaler=scaler)
    x = torch.randn(32, 2, generator=g)
    yw, yc = x[:, :1] * 2, x[:, 1:] - 1
    losses = []
    for _ in range(steps):
        for o in opts:
            o.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            w, c = model(x, connect)
        loss = (w.float() - yw).pow(2).mean() + (c.float() - yc).pow(2).mean()
        scaler.scale(loss).backward()
        for o in opts:
            scaler.step(o)
        scaler.update()
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=model)


def train(steps=80, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=80, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="params-not-trained",
    where="proposal|069_optimizer_without_gradients.py:50",
    code="scaler.step(o)",
    op="torch.amp.GradScaler.step",
    fix="let the loss reach the proposal network (no detach), or skip optimizers without gradients",
)
