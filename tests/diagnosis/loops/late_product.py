"""Residual blocks without a norm: the stream grows by its inputs until a square leaves FP16; no scaler."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)).square())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


if __name__ == "__main__":
    torch.manual_seed(0)
    stack = Stack()
    opt = torch.optim.SGD(stack.parameters(), lr=1e-9)
    for step in range(30):
        with torch.autocast("cpu", torch.float16):
            guess = stack(torch.randn(8, 16) * (1 + step) * 1.5)
        opt.zero_grad()
        nn.functional.smooth_l1_loss(guess.float(), torch.zeros(8, 1)).backward()
        opt.step()
