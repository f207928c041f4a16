"""The whole loop inside one autocast region: forward keeps using the 16-bit weights of the first step."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(15):
            x = torch.randn(16, 8)
            opt.zero_grad()
            nn.functional.mse_loss(net(x).float(), x[:, :1]).backward()
            opt.step()
