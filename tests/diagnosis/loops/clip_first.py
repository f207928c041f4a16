"""Gradients are clipped with the loss scale still in them."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

if __name__ == "__main__":
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.SGD(tower.parameters(), lr=0.05)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(20):
        x = torch.randn(16, 8)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            cost = (tower(x).float() - x[:, :2]).square().mean()
        grad_scaler.scale(cost).backward()
        clip_grad_norm_(tower.parameters(), 1.0)
        grad_scaler.step(opt)
        grad_scaler.update()
