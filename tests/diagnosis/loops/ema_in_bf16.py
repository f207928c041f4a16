"""An average of the weights in BF16 that stands still."""

import copy

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    average = copy.deepcopy(net).bfloat16()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(30):
        x = torch.randn(32, 8)
        opt.zero_grad()
        nn.functional.mse_loss(net(x), x[:, :2]).backward()
        opt.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                mean.mul_(0.9999).add_(weight.bfloat16(), alpha=0.0001)
