"""Adam on half weights: its second moment and eps are 0 in FP16."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    regressor = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).half()
    adam = torch.optim.Adam(regressor.parameters(), lr=1e-3, eps=1e-8)
    for _ in range(20):
        x = torch.randn(32, 8)
        adam.zero_grad()
        nn.functional.mse_loss(regressor(x.half()).float(), x[:, :1]).backward()
        adam.step()
