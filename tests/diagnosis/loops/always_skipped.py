"""The forward pass overflows whatever the scale is: the scaler skips every step."""

import torch
from torch import nn


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 64)

    def forward(self, x):
        h = self.proj(x)
        return (h * h).sum(-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    energy = Energy()
    opt = torch.optim.SGD(energy.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(25):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = energy(torch.randn(16, 32) * 400).float().mean().log()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
