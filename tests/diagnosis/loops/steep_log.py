"""The logarithm of small probabilities in FP16: finite, but its gradient is not. Nothing scales the loss."""

import torch
from torch import nn


def run():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(30):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            chances = torch.softmax(net(x), -1).half()[:, 0]
            loss = -torch.log(chances * 1e-7).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    run()
