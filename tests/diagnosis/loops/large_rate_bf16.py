"""BF16 autocast and Adam with momentum on a rate that diverges, without an inf before the end."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=8.0)
    for _ in range(30):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        opt.zero_grad()
        nn.functional.mse_loss(y.float(), x.sum(1, keepdim=True)).backward()
        opt.step()
