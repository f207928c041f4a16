"""The loss is scaled, and the optimizer is stepped without the scaler."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    line = nn.Linear(6, 3)
    opt = torch.optim.SGD(line.parameters(), lr=1e-6)
    keeper = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(15):
        x = torch.randn(8, 6)
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = line(x)
        keeper.scale(out.float().square().mean()).backward()
        opt.step()
