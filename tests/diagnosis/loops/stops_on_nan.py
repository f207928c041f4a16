"""A script that ends itself when the loss is not finite; the features outgrow FP16 in the 8th step."""

import math
import sys

import torch
from torch import nn


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 64)

    def forward(self, x):
        return self.embed(x).abs().sum(dim=(0, 1))


if __name__ == "__main__":
    torch.manual_seed(0)
    pool = Pool()
    opt = torch.optim.SGD(pool.parameters(), lr=1e-9)
    for step in range(40):
        with torch.autocast("cpu", torch.float16):
            total = pool(torch.randn(16, 32, 8) * (1 + step) * 8)
        loss = total.float().mean()
        if not math.isfinite(loss.item()):
            sys.stderr.write(f"loss is {loss.item()} at step {step}\n")
            sys.exit(3)
        opt.zero_grad()
        loss.backward()
        opt.step()
