"""BF16 weights and small steps: nearly every update rounds away."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4)).bfloat16()
    optimizer = torch.optim.SGD(small.parameters(), lr=2e-4)
    for _ in range(40):
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(small(x.bfloat16()).float(), x[:, :4].sin()).backward()
        optimizer.step()
