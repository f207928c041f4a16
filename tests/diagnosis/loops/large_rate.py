"""FP16 autocast, and a learning rate that FP32 does not survive either."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    sgd = torch.optim.SGD(net.parameters(), lr=3.0)
    for _ in range(30):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", torch.float16):
            y = net(x)
        sgd.zero_grad()
        nn.functional.mse_loss(y.float(), x.sum(1, keepdim=True)).backward()
        sgd.step()
