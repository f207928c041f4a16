"""BF16 weights with steps that are large enough to count: healthy."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4)).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(40):
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x.bfloat16()).float(), x[:, :4].sin()).backward()
        optimizer.step()
