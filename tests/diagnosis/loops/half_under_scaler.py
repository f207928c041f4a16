"""A half model under a GradScaler: it refuses to unscale."""

import torch
from torch import nn

if __name__ == "__main__":
    body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    body = body.half()
    opt = torch.optim.SGD(body.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(5):
        opt.zero_grad()
        loss = body(torch.randn(4, 6).half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
