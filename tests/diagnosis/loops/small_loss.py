"""Half weights and a loss of 1e-6: the gradients are below what FP16 holds."""

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).half()
    teacher = nn.Linear(16, 8)
    opt = torch.optim.SGD(student.parameters(), lr=1e4)
    for _ in range(30):
        x = torch.randn(64, 16)
        opt.zero_grad()
        with torch.no_grad():
            goal = teacher(x)
        distance = (student(x.half()).float() - goal).square().mean() * 1e-6
        distance.backward()
        opt.step()
